"""A population of three small language models trained side by side on packed rows.

Every few steps all members are scored on held-out rows; the worst one takes over weights, momentum and a changed
learning rate from the best one. At the end the two best are averaged.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

VOCAB, ROW, SEP = 24, 20, 0


class GatedLM(nn.Module):
    def __init__(self, dim=28):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.gate = nn.Sequential(nn.Linear(2 * dim, dim), nn.Sigmoid())
        self.value = nn.Sequential(nn.Linear(2 * dim, dim), nn.Tanh())
        self.out = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        state, states = torch.zeros_like(x[:, 0]), []
        keep = (ids != SEP).float()
        for t in range(ids.shape[1]):
            state = state * keep[:, t, None]            # a separator ends the document
            both = torch.cat([x[:, t], state], -1)
            g = self.gate(both)
            state = g * self.value(both) + (1 - g) * state
            states.append(state)
        return self.out(torch.stack(states, 1))


def rows(seed, n):
    """Counting sequences of random stride, packed one after the other with separators; rows may cut a document."""
    g = torch.Generator().manual_seed(seed)
    out = torch.zeros(n, ROW + 1, dtype=torch.long)
    for r in range(n):
        text = []
        while len(text) <= ROW:
            start, stride, length = (int(torch.randint(a, b, (1,), generator=g)) for a, b in ((0, 23), (1, 3), (4, 9)))
            text += [1 + (start + stride * i) % (VOCAB - 1) for i in range(length)] + [SEP]
        out[r] = torch.tensor(text[: ROW + 1])
    labels = torch.where(out[:, :-1] == SEP, -100, out[:, 1:])     # the first token of a document is not predicted
    return out[:, :-1], labels


def token_loss(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


class Member:
    """A sharded model with signed-momentum updates (Lion) written out by hand on DTensors."""

    def __init__(self, number, lr):
        torch.manual_seed(100 + number)
        self.model = GatedLM()
        fully_shard(self.model.emb)
        fully_shard(self.model)
        self.lr = lr
        self.momentum = [torch.zeros_like(p) for p in self.model.parameters()]
        self.score = float("inf")

    @torch.no_grad()
    def update(self):
        for p, m in zip(self.model.parameters(), self.momentum):
            direction = m * 0.9 + p.grad * 0.1
            # a soft sign: rounding noise near zero must not become a whole step
            p.sub_(self.lr * direction / (direction.abs() + 1e-3))
            m.mul_(0.98).add_(p.grad, alpha=0.02)
            p.grad = None

    @torch.no_grad()
    def take_over(self, other, lr_factor):
        for p, q in zip(self.model.parameters(), other.model.parameters()):
            p.copy_(q)
        for m, n in zip(self.momentum, other.momentum):
            m.copy_(n)
        self.lr = other.lr * lr_factor

    def state(self):
        return {"model": self.model.state_dict(), "momentum": {str(i): m for i, m in enumerate(self.momentum)},
                "scalars": torch.tensor([self.lr, self.score], dtype=torch.float64)}

    def load(self, s):
        self.model.load_state_dict(s["model"])
        self.momentum = [s["momentum"][str(i)] for i in range(len(self.momentum))]
        self.lr, self.score = s["scalars"].tolist()


@torch.no_grad()
def score_all(members, rank, world):
    ids, labels = rows(9, 16)
    sums = torch.stack([token_loss(m.model, ids[rank::world], labels[rank::world]) for m in members])
    for member in members:
        member.model.reshard()      # a forward without backward leaves the root gathered
    dist.all_reduce(sums)
    for member, value in zip(members, (sums / (labels != -100).sum()).tolist()):
        member.score = value


def explore(model, step):
    """Small seeded noise on the full matrices, cut into shards afterwards."""
    g = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            noise = 0.01 * torch.randn(p.shape, generator=g)
            p.add_(distribute_tensor(noise, p.device_mesh, p.placements))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=12)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--contest", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="population")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    members = [Member(i, lr) for i, lr in enumerate((3e-3, 1e-2, 2e-2))]
    step = 0
    if args.resume:
        step = max(int(d[1:]) for d in os.listdir(args.resume))
        state = {f"m{i}": m.state() for i, m in enumerate(members)}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"p{step}"))
        for i, m in enumerate(members):
            m.load(state[f"m{i}"])

    while step < args.steps:
        ids, labels = rows(5000 + step, args.batch)
        targets = (labels != -100).sum()
        shown = []
        for member in members:
            loss = token_loss(member.model, ids[rank::world], labels[rank::world]) / targets
            (loss * world).backward()
            member.update()
            shown.append(loss.detach())
        shown = torch.stack(shown)
        dist.all_reduce(shown)
        step += 1
        if rank == 0:
            print(f"step {step} losses {' '.join(f'{v:.4f}' for v in shown.tolist())}", flush=True)
        if step % args.contest == 0:
            score_all(members, rank, world)
            order = sorted(range(len(members)), key=lambda i: members[i].score)
            members[order[-1]].take_over(members[order[0]], 0.8)
            explore(members[order[-1]].model, step)
        if args.save_every and step % args.save_every == 0:
            dcp.save({f"m{i}": m.state() for i, m in enumerate(members)}, checkpoint_id=os.path.join(args.out, f"p{step}"))

    score_all(members, rank, world)
    first, second = sorted(members, key=lambda m: m.score)[:2]
    with torch.no_grad():
        for p, q in zip(first.model.parameters(), second.model.parameters()):
            p.lerp_(q, 0.5)
    score_all([first], rank, world)
    if rank == 0:
        print(f"averaged model: held-out loss {first.score:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
