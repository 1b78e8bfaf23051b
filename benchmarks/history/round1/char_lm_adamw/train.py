"""Character language model on generated arithmetic strings, sharded with FSDP2.

    torchrun --nproc-per-node 2 train.py --save-every 8 --ckpt runs
    torchrun --nproc-per-node 2 train.py --resume --ckpt runs
"""
import argparse
import json
import math
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCAB = "0123456789+-=. "
STOI = {c: i for i, c in enumerate(VOCAB)}
MODEL_NAME = "weights"
OPTIMIZER_NAME = "optimizer"


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch-size", type=int, default=16, help="over all ranks")
    p.add_argument("--seq-len", type=int, default=32)
    p.add_argument("--width", type=int, default=32)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--warmup", type=int, default=4)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--run-name", default="charlm_optimizer_adamw")
    p.add_argument("--ckpt", default=None, help="folder of all runs")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


class ConvBlock(nn.Module):
    """Causal depthwise convolution followed by a gated MLP."""

    def __init__(self, width, kernel=5):
        super().__init__()
        self.kernel = kernel
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, kernel, groups=width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.norm(x).transpose(1, 2)
        h = self.conv(F.pad(h, (self.kernel - 1, 0))).transpose(1, 2)
        a, b = self.up(h).chunk(2, dim=-1)
        return x + self.down(F.silu(a) * b)


class CharLM(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Embedding(len(VOCAB), width)
        self.blocks = nn.ModuleList(ConvBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCAB))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_text(rng, length):
    out = ""
    while len(out) < length:
        a, b = rng.randrange(100), rng.randrange(100)
        op = rng.choice("+-")
        out += f"{a}{op}{b}={a + b if op == '+' else a - b}. "
    return [STOI[c] for c in out[:length]]


def batch_for_step(step, args, rank, world):
    """The rows of this rank in the global batch of a step."""
    rng = random.Random(args.seed * 100003 + step)
    rows = [make_text(rng, args.seq_len + 1) for _ in range(args.batch_size)]
    ids = torch.tensor(rows[rank::world])
    return ids[:, :-1], ids[:, 1:]


def part_dir(input_dir, name, index=0):
    """Folder of one part (weights or optimizer); the part itself may be given."""
    part = f"{name}_{index}"
    return input_dir if os.path.basename(input_dir) == part else os.path.join(input_dir, part)


def save_checkpoint(run_dir, step, model, optimizer, scheduler):
    out = os.path.join(run_dir, f"step_{step:05d}")
    weights_dir = os.path.join(out, f"{MODEL_NAME}_0")
    optim_dir = os.path.join(out, f"{OPTIMIZER_NAME}_0")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=weights_dir)
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=optim_dir)
    if dist.get_rank() == 0:
        torch.save({"step": step, "scheduler": scheduler.state_dict()}, os.path.join(out, "trainer.pt"))
        with open(os.path.join(run_dir, "latest.json"), "w") as f:
            json.dump({"step": step}, f)
        print(f"saved {out}", flush=True)
    dist.barrier()


def load_checkpoint(run_dir, model, optimizer, scheduler):
    with open(os.path.join(run_dir, "latest.json")) as f:
        step = json.load(f)["step"]
    src = os.path.join(run_dir, f"step_{step:05d}")

    weights = {"model": get_model_state_dict(model)}
    dcp.load(weights, checkpoint_id=part_dir(src, MODEL_NAME))
    set_model_state_dict(model, weights["model"])

    optim = {"optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(optim, checkpoint_id=part_dir(src, OPTIMIZER_NAME))
    set_optimizer_state_dict(model, optimizer, optim["optim"])

    trainer = torch.load(os.path.join(src, "trainer.pt"))
    scheduler.load_state_dict(trainer["scheduler"])
    return trainer["step"]


@torch.no_grad()
def evaluate(model, args, rank, world, batches=4):
    model.eval()
    total = torch.zeros(2)
    for i in range(batches):
        x, y = batch_for_step(10**6 + i, args, rank, world)
        logits = model(x)
        total[0] += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        total[1] += y.numel()
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def main():
    args = parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    model = CharLM(args.width, args.layers)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)

    def lr_at(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        t = (step - args.warmup) / max(1, args.steps - args.warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * t))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at)

    run_dir = os.path.join(args.ckpt, args.run_name) if args.ckpt else None
    start = 0
    if args.resume:
        start = load_checkpoint(run_dir, model, optimizer, scheduler)
        if rank == 0:
            print(f"resumed at step {start}", flush=True)

    for step in range(start, args.steps):
        x, y = batch_for_step(step, args, rank, world)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.6f} grad_norm {grad_norm.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(run_dir, step + 1, model, optimizer, scheduler)

    val = evaluate(model, args, rank, world)
    if rank == 0:
        print(f"val loss {val:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
