"""Character model on made-up text. Warm-up, cosine, then a constant tail for annealing."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCAB = 24


class Block(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharLM(nn.Module):
    def __init__(self, width, depth, length):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)
        self.jitter = 0.05

    def forward(self, ids):
        x = self.tokens(ids) + self.places
        if self.training:
            # one scale per call, from the global generator
            x = x * (1 + self.jitter * (2 * torch.rand(()).item() - 1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def text(seed, rows, length):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, 1), generator=g)
    stride = torch.randint(1, 4, (rows, 1), generator=g)
    ids = (ids + stride * torch.arange(length + 1)) % VOCAB
    noise = torch.rand(ids.shape, generator=g) < 0.05
    return torch.where(noise, torch.randint(VOCAB, ids.shape, generator=g), ids)


def learning_rate(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    if step < args.tail:
        done = (step - args.warmup) / (args.tail - args.warmup)
        return args.lr * (0.2 + 0.4 * (1 + math.cos(math.pi * done)))
    return args.lr * 0.2


def shard(model, args):
    policy = MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def evaluate(model, args, rank, world):
    model.eval()
    with torch.no_grad():
        ids = text(999_983, args.batch, args.length)[rank::world]
        loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
    dist.all_reduce(loss)
    model.train()
    return loss.item() / world


def arguments():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=80)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--length", type=int, default=16)
    ap.add_argument("--width", type=int, default=32)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--warmup", type=int, default=8)
    ap.add_argument("--tail", type=int, default=60)
    ap.add_argument("--accum", type=int, default=1)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--bf16", action="store_true")
    ap.add_argument("--eval-every", type=int, default=25)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    return ap.parse_args()


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = CharLM(args.width, 2, args.length)
    shard(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6, weight_decay=0.05)
    start = 0
    if args.resume:
        weights, optim = get_state_dict(model, optimizer)
        state = {"weights": weights, "optim": optim, "step": 0, "rng": torch.get_rng_state()}
        newest = max(os.listdir(args.resume), key=int)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)
        torch.set_rng_state(state["rng"])
        start = state["step"]

    for step in range(start, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        ids = text(step, args.batch, args.length)[rank::world]
        total = 0.0
        for micro in ids.chunk(args.accum):
            loss = F.cross_entropy(model(micro[:, :-1]).float().flatten(0, 1), micro[:, 1:].flatten())
            loss = loss if args.accum == 1 else loss / args.accum
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1:3d} loss {total.item() / world:.5f}", flush=True)
        if (step + 1) % args.eval_every == 0:
            value = evaluate(model, args, rank, world)
            if rank == 0:
                print(f"step {step + 1:3d} held-out {value:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            weights, optim = get_state_dict(model, optimizer)
            state = {"weights": weights, "optim": optim, "step": step + 1, "rng": torch.get_rng_state()}
            dcp.save(state, checkpoint_id=os.path.join(args.out, str(step + 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
