"""Masked language model; masking and dropout draw from the rank's own generator."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import checkpoint

VOCAB, MASK, CTX = 48, 0, 24


class Encoder(nn.Module):
    def __init__(self, dim=40, depth=2, dropout=0.1):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(CTX, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=dropout, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        h = self.tok(ids) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def sentences(step, n):
    g = torch.Generator().manual_seed(700 + step)
    base = torch.randint(1, VOCAB, (n, 4), generator=g)
    ids = base.repeat(1, CTX // 4)
    noise = torch.rand(ids.shape, generator=g) < 0.05
    return torch.where(noise, torch.randint(1, VOCAB, ids.shape, generator=g), ids)


def mask_tokens(ids, p):
    if p == 0:
        hidden = torch.zeros_like(ids, dtype=torch.bool)
        hidden[:, ::5] = True
    else:
        hidden = torch.rand(ids.shape) < p
    return ids.masked_fill(hidden, MASK), hidden


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--mask", type=float, default=0.2, help="0: every fifth token")
    ap.add_argument("--dropout", type=float, default=0.1)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(5)
    model = Encoder(dropout=args.dropout)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=4e-3, total_steps=args.steps + 1)
    torch.manual_seed(1000 + rank)

    start = checkpoint.load(args.resume, model, opt, sched) if args.resume else 0
    per = args.batch // world
    for step in range(start, args.steps):
        ids = sentences(step, args.batch)[rank * per : (rank + 1) * per]
        seen, hidden = mask_tokens(ids, args.mask)
        # masked positions are counted over all ranks, so that every one weighs the same
        count = hidden.sum().float()
        dist.all_reduce(count)
        logits = model(seen)
        loss = F.cross_entropy(logits[hidden], ids[hidden], reduction="sum") * world / count
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 3 == 1:
            print(f"[{step}] loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            checkpoint.save(args.out, step + 1, model, opt, sched)

    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
