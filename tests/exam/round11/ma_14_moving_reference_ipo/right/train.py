"""Preference tuning (IPO) with a reference that follows the policy.

The reference is the sharded policy with other numbers: its weights are kept as local shards and swapped in to score
the whole preference set every few steps. The scores are a table on all ranks, filled by one all-reduce.
"""
import argparse
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

VOCAB, LEN, PAIRS = 28, 9, 64


class ConvLM(nn.Module):
    def __init__(self, dim=32, layers=2, width=3):
        super().__init__()
        self.width = width
        self.emb = nn.Embedding(VOCAB, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, width) for _ in range(layers))
        self.out = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        """Log-probability of every sequence."""
        x = self.emb(ids[:, :-1]).transpose(1, 2)
        for conv in self.convs:
            x = x + torch.tanh(conv(F.pad(x, (self.width - 1, 0))))
        logp = self.out(x.transpose(1, 2)).log_softmax(-1)
        return logp.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def preference_set():
    g = torch.Generator().manual_seed(77)
    start = torch.randint(0, VOCAB, (PAIRS, 1), generator=g)
    chosen = (start + 2 * torch.arange(LEN)) % VOCAB
    rejected = torch.cat([start, torch.randint(0, VOCAB, (PAIRS, LEN - 1), generator=g)], 1)
    return chosen, rejected


class MovingReference:
    def __init__(self, model, rate):
        self.model, self.rate = model, rate
        self.local = [p.to_local().detach().clone() for p in model.parameters()]
        self.table = torch.zeros(PAIRS)

    @contextmanager
    def in_place(self):
        current = [p.to_local().detach().clone() for p in self.model.parameters()]
        with torch.no_grad():
            for p, r in zip(self.model.parameters(), self.local):
                p.to_local().copy_(r)
        yield
        self.model.reshard()        # a forward without backward leaves the root gathered
        with torch.no_grad():
            for p, c in zip(self.model.parameters(), current):
                p.to_local().copy_(c)

    @torch.no_grad()
    def follow(self):
        for p, r in zip(self.model.parameters(), self.local):
            r.lerp_(p.to_local(), self.rate)

    @torch.no_grad()
    def score(self, chosen, rejected, rank, world):
        self.table.zero_()
        with self.in_place():
            self.table[rank::world] = self.model(chosen[rank::world]) - self.model(rejected[rank::world])
        dist.all_reduce(self.table)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=15)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--refresh", type=int, default=4)
    ap.add_argument("--tau", type=float, default=0.1)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ipo")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    model = ConvLM()
    for conv in model.convs:
        fully_shard(conv)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.5)
    chosen, rejected = preference_set()
    ref = MovingReference(model, rate=0.5)
    picker = torch.Generator().manual_seed(5)          # the same on all ranks
    step = 0

    if args.resume:
        newest = max(int(d) for d in os.listdir(args.resume))
        s = torch.load(os.path.join(args.resume, str(newest), f"{rank}.pt"), weights_only=False)
        model.load_state_dict(s["model"])
        opt.load_state_dict(s["opt"])
        ref.local, ref.table, step = s["ref"], s["table"], s["step"]
        picker.set_state(s["picker"])

    while step < args.steps:
        if step % args.refresh == 0:
            if step:
                ref.follow()
            ref.score(chosen, rejected, rank, world)
        idx = torch.randperm(PAIRS, generator=picker)[: args.batch][rank::world]
        gap = model(torch.cat([chosen[idx], rejected[idx]]))
        gap = gap[: len(idx)] - gap[len(idx):] - ref.table[idx]
        loss = (gap - 1 / (2 * args.tau)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        stats = torch.stack([loss.detach(), (gap > 0).float().mean()]) / world
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step} loss {stats[0]:.4f} wins {stats[1]:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            os.makedirs(os.path.join(args.out, str(step)), exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "ref": ref.local, "table": ref.table,
                        "picker": picker.get_state(), "step": step}, os.path.join(args.out, str(step), f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
