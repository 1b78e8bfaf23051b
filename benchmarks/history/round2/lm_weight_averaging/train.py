"""Language model training with running weight averages (EMA and polynomial) next to the trained model."""
import argparse
import itertools
import logging
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-num-samples", type=int, default=320)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--accum-freq", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=20)
    parser.add_argument("--vocab-size", type=int, default=32)
    parser.add_argument("--dim", type=int, default=24)
    parser.add_argument("--n-layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--grad-clip-norm", type=float, default=1.0)
    parser.add_argument("--averagers", default="ema_0.9,poly_4", help="comma separated: ema_DECAY or poly_ETA")
    parser.add_argument(
        "--log-avg-model-training-loss",
        type=int,
        default=0,
        help="also log the averaged models' training loss, every so many steps (0: never)",
    )
    parser.add_argument("--log-every-n-steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.per_gpu_batch_size = args.global_batch_size // args.world_size
    return args


def is_master(args):
    return args.rank == 0


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = self.sum = self.count = self.avg = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1 = nn.LayerNorm(dim)
        self.n2 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.w12 = nn.Linear(dim, 4 * dim, bias=False)
        self.w3 = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        gate, up = self.w12(self.n2(x)).chunk(2, -1)
        return x + self.w3(F.silu(gate) * up)


class LM(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tok = nn.Embedding(args.vocab_size, args.dim)
        self.pos = nn.Parameter(0.02 * torch.randn(args.seq_len, args.dim))
        self.layers = nn.ModuleList(Block(args.dim) for _ in range(args.n_layers))
        self.norm = nn.LayerNorm(args.dim)
        self.out = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def create_model(args, device):
    torch.manual_seed(args.seed)
    model = LM(args).to(device)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model, reshard_after_forward=True)


class Averager:
    """A sharded copy of the model that follows its weights."""

    def __init__(self, model, av_model, method):
        self.model, self.av_model = model, av_model.eval().requires_grad_(False)
        self.kind, coeff = method.split("_")
        self.coeff = float(coeff)
        self.update_counter = 1

    @torch.no_grad()
    def step(self):
        t = self.update_counter
        weight = 1 - self.coeff if self.kind == "ema" else (self.coeff + 1) / (t + self.coeff)
        for avg, p in zip(self.av_model.parameters(), self.model.parameters()):
            avg.lerp_(p.detach(), min(weight, 1.0))
        self.update_counter += 1


class ModelAverager:
    def __init__(self, model, args, device):
        self.avgs_dict = {m: Averager(model, create_model(args, device), m) for m in args.averagers.split(",")}

    def step(self):
        for averager in self.avgs_dict.values():
            averager.step()


def make_tokens(args, n, seed):
    """Each sequence walks the vocabulary by one of a few fixed successor maps."""
    maps = np.stack([np.random.default_rng(5 + i).permutation(args.vocab_size) for i in range(3)])
    rng = np.random.default_rng(seed)
    which = rng.integers(0, 3, n)
    seqs = [rng.integers(0, args.vocab_size, n)]
    for _ in range(args.seq_len):
        seqs.append(maps[which, seqs[-1]])
    return torch.from_numpy(np.stack(seqs, 1))


def chunk_loss(model, texts):
    return F.cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())


def train_one_epoch(model, texts_all, averagers, epoch, step, optimizer, scheduler, total_steps, args, device):
    model.train()
    order = np.random.default_rng(args.seed + epoch).permutation(len(texts_all))
    num_batches = len(order) // args.global_batch_size

    losses_m = AverageMeter()
    batch_time_m = AverageMeter()
    if averagers is not None and args.log_avg_model_training_loss:
        losses_avg_m = {key: AverageMeter() for key in averagers.avgs_dict.keys()}

    end = time.time()
    for i in itertools.count():
        if step >= total_steps or i >= num_batches:
            break
        scheduler(step)
        first = i * args.global_batch_size + args.rank * args.per_gpu_batch_size
        texts = texts_all[order[first : first + args.per_gpu_batch_size]].to(device)
        log_avg = averagers is not None and args.log_avg_model_training_loss
        log_avg = log_avg and i % args.log_avg_model_training_loss == 0

        optimizer.zero_grad()
        total_loss = torch.zeros((), device=device)
        total_loss_avg = {}
        for ii, chunk in enumerate(texts.chunk(args.accum_freq)):
            # reduce gradients only with the last chunk
            model.set_requires_gradient_sync(ii == args.accum_freq - 1)
            local_loss = chunk_loss(model, chunk) * len(chunk) / len(texts)
            local_loss.backward()
            total_loss += local_loss.detach()
        if log_avg:
            with torch.no_grad():
                for key, averager in averagers.avgs_dict.items():
                    total_loss_avg[key] = chunk_loss(averager.av_model, texts)

        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip_norm)
        optimizer.step()
        if averagers is not None:
            averagers.step()
        batch_time_m.update(time.time() - end)
        end = time.time()

        for value in [total_loss, *total_loss_avg.values()]:
            dist.all_reduce(value)
            value /= args.world_size
        step += 1

        if is_master(args):
            batch_size = len(texts)
            losses_m.update(total_loss.item(), batch_size)
            for key, value in total_loss_avg.items():
                losses_avg_m[key].update(value.item(), batch_size)
            if i % args.log_every_n_steps == 0 or i + 1 == num_batches or step == total_steps:
                message = f"Train Epoch: {epoch} [{i + 1}/{num_batches}] Loss: {losses_m.avg:.6f} "
                if averagers is not None and args.log_avg_model_training_loss:
                    message += "".join(f"{k}: {m.avg:.6f} " for k, m in losses_avg_m.items())
                logging.info(message + f"Batch (t): {batch_time_m.avg:.3f} LR: {optimizer.param_groups[0]['lr']:5f}")

                # resetting all meters per log window
                batch_time_m.reset()
                losses_m.reset()
                if averagers is not None and args.log_avg_model_training_loss:
                    for k in averagers.avgs_dict.keys():
                        losses_avg_m[k].reset()
    return step


@torch.no_grad()
def evaluate(model, texts, args, device):
    model.eval()
    loss = chunk_loss(model, texts.chunk(args.world_size)[args.rank].to(device))
    dist.all_reduce(loss)
    return loss.item() / args.world_size


def main():
    args = parse_args()
    logging.basicConfig(level=logging.INFO if is_master(args) else logging.WARNING, format="%(asctime)s %(message)s")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    model = create_model(args, device)
    averagers = ModelAverager(model, args, device) if args.averagers else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    total_steps = args.epochs * (args.train_num_samples // args.global_batch_size)

    def scheduler(step):
        warm = min(1.0, (step + 1) / args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * 0.5 * (1 + math.cos(math.pi * step / total_steps))

    train, val = make_tokens(args, args.train_num_samples, 1), make_tokens(args, 32, 2)
    step = 0
    for epoch in range(args.epochs):
        step = train_one_epoch(model, train, averagers, epoch, step, optimizer, scheduler, total_steps, args, device)
        models = {"model": model}
        if averagers is not None:
            models.update({k: a.av_model for k, a in averagers.avgs_dict.items()})
        for name, m in models.items():
            logging.info(f"Eval Epoch: {epoch} step {step} {name} loss {evaluate(m, val, args, device):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
