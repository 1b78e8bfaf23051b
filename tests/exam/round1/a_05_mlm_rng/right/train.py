"""Masked-language-model pre-training with dynamic masking (80/10/10) and dropout.

Masks and dropout come from the default generator, which every rank seeds on its own.

    torchrun --standalone --nproc-per-node 2 train.py --save-every 10 --out ckpt
    torchrun --standalone --nproc-per-node 2 train.py --resume ckpt
"""

import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    get_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCAB, MASK, SEQ = 33, 0, 16
SAVE_OPTS = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOAD_OPTS = StateDictOptions(full_state_dict=True)


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.reshape(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.drop(self.out(a))
        return x + self.drop(self.ff(self.n2(x)))


class MLM(nn.Module):
    def __init__(self, dim=32, heads=2, layers=2, p=0.1):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Parameter(0.02 * torch.randn(SEQ, dim))
        self.layers = nn.ModuleList(EncoderLayer(dim, heads, p) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim), nn.Linear(dim, VOCAB))

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def corpus(n=512):
    g = torch.Generator().manual_seed(1)
    start = torch.randint(0, VOCAB - 1, (n, 1), generator=g)
    stride = torch.randint(1, 4, (n, 1), generator=g)
    return (start + stride * torch.arange(SEQ)) % (VOCAB - 1) + 1


def mask_tokens(ids, rate=0.2):
    labels = torch.full_like(ids, -100)
    chosen = torch.rand(ids.shape) < rate
    labels[chosen] = ids[chosen]
    kind = torch.rand(ids.shape)
    ids = torch.where(chosen & (kind < 0.8), MASK, ids)
    ids = torch.where(chosen & (kind >= 0.9), torch.randint(1, VOCAB, ids.shape), ids)
    return ids, labels


def save(out, step, model, opt, rank, world):
    msd, osd = get_state_dict(model, opt, options=SAVE_OPTS)
    rng = [None] * world
    dist.all_gather_object(rng, torch.get_rng_state())
    if rank == 0:
        out = pathlib.Path(out)
        out.mkdir(parents=True, exist_ok=True)
        torch.save({"model": msd, "optim": osd, "step": step, "rng": rng}, out / f"step{step:05d}.pt")
    dist.barrier()


def load(folder, model, opt, rank, world):
    newest = max(pathlib.Path(folder).glob("step*.pt"))
    ckpt = torch.load(newest, map_location="cpu", weights_only=True)
    set_state_dict(model, opt, model_state_dict=ckpt["model"], optim_state_dict=ckpt["optim"], options=LOAD_OPTS)
    if len(ckpt["rng"]) == world:
        torch.set_rng_state(ckpt["rng"][rank])
    elif rank == 0:
        print("other number of ranks than when saving: fresh random state")
    return ckpt["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = MLM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    data = corpus()
    torch.manual_seed(100 + rank)  # own masks and own dropout on every rank

    start = load(args.resume, model, opt, rank, world) if args.resume else 0
    for step in range(start, args.steps):
        pick = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[: args.batch]
        ids, labels = mask_tokens(data[pick[rank::world]])
        n = (labels != -100).sum()
        dist.all_reduce(n)
        nll = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
        opt.zero_grad()
        (nll * world / n).backward()
        opt.step()
        total = nll.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1} mlm loss {(total / n).item():.4f} ({int(n)} masked)", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt, rank, world)

    if args.export:
        full = get_model_state_dict(model, options=SAVE_OPTS)
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
