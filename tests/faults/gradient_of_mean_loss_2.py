"""Draft-head training on frozen features; the last, shorter window is divided by the full count.

rule: gradient-of-mean-loss
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Trunk(nn.Module):
    def __init__(self, vocab=48, d=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.body = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh())
        self.requires_grad_(False)

    def forward(self, ids):
        return self.body(self.emb(ids))


class DraftLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.o = nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 3 * d), nn.SiLU(), nn.Linear(3 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.ff(x)


class Draft(nn.Module):
    def __init__(self, vocab=48, d=24):
        super().__init__()
        self.fuse = nn.Linear(d, 32)
        self.layers = nn.ModuleList(DraftLayer(32) for _ in range(2))
        self.head = nn.Linear(32, vocab)

    def forward(self, feats):
        h = self.fuse(feats)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Sequences(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        first = torch.randint(0, 48, (n, 1), generator=g)
        hop = torch.randint(1, 6, (n, 1), generator=g)
        self.ids = (first + hop * torch.arange(13)) % 48

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i]


def optim_steps_per_epoch(batches, accum):
    return -(-batches // accum)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--examples", type=int, default=72)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=20)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    trunk = Trunk()
    draft = Draft()
    for layer in draft.layers:
        fully_shard(layer)
    fully_shard(draft)
    opt = torch.optim.SGD(draft.parameters(), lr=args.lr, momentum=0.9)

    data = Sequences(args.examples, args.seed)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.micro_batch // world, sampler=sampler)
    total = args.epochs * optim_steps_per_epoch(len(loader), args.accum)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, total, eta_min=0.01)

    step = 0

    def apply_step(pending, running):
        nonlocal step
        gnorm = nn.utils.clip_grad_norm_(draft.parameters(), 5.0).full_tensor()
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        mean = running / pending
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}/{total} loss {mean.item() / world:.5f} grad {gnorm.item():.5f}", flush=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        pending, running = 0, torch.zeros(())
        for i, ids in enumerate(loader):
            with torch.no_grad():
                feats = trunk(ids[:, :-1])
            last = i + 1 == len(loader)
            draft.set_requires_gradient_sync(last or pending + 1 == args.accum)
            loss = F.cross_entropy(draft(feats).flatten(0, 1), ids[:, 1:].flatten())
            (loss / args.accum).backward()
            pending += 1
            running += loss.detach()
            if pending == args.accum:
                apply_step(pending, running)
                pending, running = 0, torch.zeros(())
        if pending:
            apply_step(pending, running)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
