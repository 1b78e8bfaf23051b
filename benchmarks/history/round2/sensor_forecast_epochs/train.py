"""Forecast the next reading of a set of flow sensors, one recorded day per epoch."""
import argparse
import logging
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

CHANNELS, WINDOW = 6, 16


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--days", type=int, default=6, help="recorded days, one epoch each")
    p.add_argument("--windows-per-day", type=int, default=128)
    p.add_argument("--batch-size", type=int, default=16, help="over all ranks")
    p.add_argument("--width", type=int, default=24)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--grad-clip", type=float, default=1.0)
    p.add_argument("--log-every", type=int, default=4)
    p.add_argument("--seed", type=int, default=3)
    return p.parse_args()


class AverageMeter:
    """Latest value and average since the last reset."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.val = 0.0
        self.avg = 0.0
        self.sum = 0.0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class MixerBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.time_norm = nn.LayerNorm(width)
        self.time_mix = nn.Linear(WINDOW, WINDOW)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.time_mix(self.time_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Forecaster(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        self.inp = nn.Linear(CHANNELS, width)
        self.blocks = nn.ModuleList(MixerBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, CHANNELS)
        nn.init.zeros_(self.out.weight)

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = block(h)
        return x[:, -1] + self.out(self.norm(h[:, -1]))


def record_day(day, n_windows, seed):
    """Readings of one day, cut into windows. Day 4 holds a recalibration of sensor 2 (one reading under zero)."""
    rng = np.random.default_rng([seed, day])
    base = np.random.default_rng(seed)
    t = np.arange(n_windows + WINDOW) + 1000 * day
    freq = base.uniform(0.2, 0.8, CHANNELS)
    phase = base.uniform(0, 6.28, CHANNELS)
    flow = 3.0 + np.sin(freq * t[:, None] + phase) + 0.4 * np.sin(0.5 * freq[::-1] * t[:, None])
    flow += 0.05 * rng.standard_normal(flow.shape)
    if day == 4:
        flow[n_windows // 2, 2] = -0.01
    return np.lib.stride_tricks.sliding_window_view(flow, WINDOW + 1, axis=0).transpose(0, 2, 1)[:n_windows]


def preprocess(windows):
    """Flows vary over decades between plants: model their logarithm."""
    with np.errstate(invalid="ignore"):
        logs = np.log(windows).astype(np.float32)
    x = torch.from_numpy(logs)
    return x[:, :-1], x[:, -1]


class DayLoader:
    def __init__(self, windows, batch_size, epoch, seed, device):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.windows, self.batch_size, self.device = windows, batch_size, device
        self.order = np.random.default_rng([seed, 7, epoch]).permutation(len(windows))
        self.num_batches = len(windows) // batch_size

    def __iter__(self):
        local = self.batch_size // self.world
        for i in range(self.num_batches):
            first = i * self.batch_size + self.rank * local
            x, y = preprocess(self.windows[self.order[first : first + local]])
            yield x.to(self.device), y.to(self.device)


def train_one_epoch(model, loader, optimizer, scheduler, epoch, step, args):
    """Returns (success, step); success is False when the loss is not a number any more."""
    model.train()
    losses_m = AverageMeter()
    norms_m = AverageMeter()
    world = dist.get_world_size()
    for i, (x, y) in enumerate(loader):
        scheduler(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        step += 1

        global_loss = loss.detach().clone()
        dist.all_reduce(global_loss)
        losses_m.update(global_loss.item() / world, args.batch_size)
        norms_m.update(norm.full_tensor().item())

        batch_count = i + 1
        if batch_count % args.log_every == 0 or batch_count == loader.num_batches:
            logging.info(
                f"day {epoch} [{batch_count}/{loader.num_batches}] step {step} loss {losses_m.avg:.6f} "
                f"grad norm {norms_m.avg:.4f} lr {optimizer.param_groups[0]['lr']:.2e}"
            )

            # a bad node or record: leave before its weights are kept
            if math.isnan(losses_m.val):
                return False, step

            # new log window
            norms_m.reset()
            losses_m.reset()
    return True, step


@torch.no_grad()
def evaluate(model, args, device):
    model.eval()
    loader = DayLoader(record_day(100, 64, args.seed), args.batch_size, 0, args.seed, device)
    total = torch.zeros(2, device=device)
    for x, y in loader:
        total += torch.stack([F.mse_loss(model(x), y), F.mse_loss(x[:, -1], y)])
    dist.all_reduce(total)
    return (total / (loader.num_batches * loader.world)).tolist()


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s | %(message)s")

    torch.manual_seed(args.seed)
    model = Forecaster(args.width).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-5, weight_decay=0.01)
    total_steps = args.days * (args.windows_per_day // args.batch_size)

    def scheduler(step):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 4) * (1 - 0.9 * step / total_steps)

    def snapshot():
        return {k: v.detach().clone() for k, v in get_model_state_dict(model).items()}

    step, kept, kept_day = 0, snapshot(), None
    for day in range(args.days):
        windows = record_day(day, args.windows_per_day, args.seed)
        loader = DayLoader(windows, args.batch_size, day, args.seed, device)
        success, step = train_one_epoch(model, loader, optimizer, scheduler, day, step, args)
        if not success:
            logging.info(f"day {day}: loss is NaN at step {step}, going back to the weights of day {kept_day}")
            break
        kept, kept_day = snapshot(), day

    set_model_state_dict(model, kept)
    norm = sum(p.detach().full_tensor().double().square().sum().item() for p in model.parameters()) ** 0.5
    mse, naive = evaluate(model, args, device)
    logging.info(f"weights of day {kept_day}: test mse {mse:.6f} (last value {naive:.6f}) weight norm {norm:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
