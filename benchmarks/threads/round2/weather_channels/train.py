"""Autoregressive emulator of a small synthetic "atmosphere" on a ring of grid points.

The network predicts the tendency of 7 channels from the present state and a forcing.
A shadow copy of the weights (EMA) is kept sharded, the way the model is, and written
as one full file next to the checkpoint, for inference without the trainer.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

CHANNELS, FORCING, GRID = 7, 2, 12


class ConvBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.conv1 = nn.Conv1d(width, width, 3, padding=1, padding_mode="circular")
        self.conv2 = nn.Conv1d(width, width, 3, padding=1, padding_mode="circular")

    def forward(self, x):
        return x + self.conv2(F.gelu(self.conv1(self.norm(x))))


class Emulator(nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.stem = nn.Conv1d(CHANNELS + FORCING, width, 1)
        self.blocks = nn.ModuleList(ConvBlock(width) for _ in range(depth))
        self.head = nn.Conv1d(width, CHANNELS, 1)

    def forward(self, state, forcing):
        h = self.stem(torch.cat([state, forcing], dim=1))
        for block in self.blocks:
            h = block(h)
        return state + 0.1 * self.head(h)


class EMATracker:
    """EMA of the local shards; elementwise, so it needs no communication to update."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().to_local().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach().to_local(), 1.0 - self.decay)

    @torch.no_grad()
    def swap(self, model):
        for name, p in model.named_parameters():
            local = p.detach().to_local()
            kept = local.clone()
            local.copy_(self.shadow[name])
            self.shadow[name] = kept

    def state_dict(self, model):
        """The full averaged weights, on every rank."""
        full = {}
        for name, p in model.named_parameters():
            shadow = DTensor.from_local(self.shadow[name], p.device_mesh, p.placements,
                                        shape=p.shape, stride=p.stride())
            full[name] = shadow.full_tensor()
        return full

    def load_state_dict(self, state, model):
        for name, p in model.named_parameters():
            sharded = distribute_tensor(state[name], p.device_mesh, p.placements)
            self.shadow[name] = sharded.to_local().clone()


def simulate(n, seed):
    """n transitions (state, forcing, next state) of a nonlinear advection, on every rank."""
    gen = torch.Generator().manual_seed(seed)
    state = torch.randn(n, CHANNELS, GRID, generator=gen)
    forcing = torch.randn(n, FORCING, GRID, generator=gen)
    flow = torch.tanh(state.roll(1, -1)) - 0.3 * state + 0.2 * state.roll(1, 1)
    flow = flow + 0.3 * forcing.sum(1, keepdim=True)
    return state, forcing, state + 0.1 * flow


def local_part(tensors, device):
    return [t[dist.get_rank()::dist.get_world_size()].to(device) for t in tensors]


@torch.no_grad()
def evaluate(model, device, n=64):
    state, forcing, target = local_part(simulate(n, 4242), device)
    total = (model(state, forcing) - target).square().sum() * 100
    dist.all_reduce(total)
    return total.item() / (n * CHANNELS * GRID)


def save(path, model, optimizer, ema, step):
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state, "step": step}, checkpoint_id=path)
    ema_state = ema.state_dict(model)
    if dist.get_rank() == 0:
        torch.save(ema_state, os.path.join(path, "checkpoint_ema.pt"))
    dist.barrier()


def load(path, model, optimizer, ema, device):
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optim"])
    ema.load_state_dict(torch.load(os.path.join(path, "checkpoint_ema.pt"), map_location=device),
                        model)
    return state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--ema-decay", type=float, default=0.8)
    parser.add_argument("--ckpt", default=None)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    main_rank = dist.get_rank() == 0

    torch.manual_seed(3)
    model = Emulator().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ema = EMATracker(model, args.ema_decay)
    first = load(args.ckpt, model, optimizer, ema, device) if args.resume else 0

    for step in range(first, args.steps):
        state, forcing, target = local_part(simulate(args.batch_size, 10 + step), device)
        loss = (model(state, forcing) - target).square().mean() * 100
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if main_rank and step % 4 == 3:
            print(f"step {step + 1:3d}  loss {shown.item() / dist.get_world_size():.6f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            save(args.ckpt, model, optimizer, ema, step + 1)

    raw = evaluate(model, device)
    ema.swap(model)
    averaged = evaluate(model, device)
    ema.swap(model)
    size = sum(w.double().square().sum().item() for w in ema.state_dict(model).values()) ** 0.5
    if main_rank:
        print(f"validation: raw {raw:.6f}  averaged {averaged:.6f}  norm of the average {size:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
