"""Rating model trained by turns: the user side moves for a few steps while the item side stands still, then the other
way round. Two FSDP modules, two different optimizers; ratings are dealt out by user, so ranks hold unequal counts and the
loss is normalised by the count of the whole step."""

import argparse
import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

USERS, ITEMS, DIM = 36, 28, 8


class Side(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.vector = nn.Embedding(count, DIM)
        self.bias = nn.Embedding(count, 1)
        self.mix = nn.Linear(DIM, DIM)
        nn.init.normal_(self.vector.weight, std=0.3)
        nn.init.zeros_(self.bias.weight)

    def forward(self, ids):
        v = self.vector(ids)
        return v + torch.tanh(self.mix(v)), self.bias(ids).squeeze(-1)


def ratings():
    g = torch.Generator().manual_seed(180)
    # some users rate much more than others
    u = (torch.rand(700, generator=g) ** 2 * USERS).long()
    i = torch.randint(0, ITEMS, (700,), generator=g)
    p, q = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    r = (p[u] * q[i]).sum(1) + torch.randn(ITEMS, generator=g)[i]
    return u, i, r + 0.1 * torch.randn(700, generator=g)


def turns(steps, length):
    """user, user, user, item, item, item, user, ..."""
    names = itertools.cycle(["user"] * length + ["item"] * length)
    return zip(range(steps), names)


class Alternation:
    def __init__(self, args):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(18)
        # forward passes without backward are common here: always give the gathered weights back
        self.side = {
            "user": fully_shard(Side(USERS), reshard_after_forward=True),
            "item": fully_shard(Side(ITEMS), reshard_after_forward=True),
        }
        self.optim = {
            "user": torch.optim.Adam(self.side["user"].parameters(), lr=args.lr, eps=1e-5),
            "item": torch.optim.SGD(
                [
                    {"params": self.side["item"].vector.parameters(), "lr": 3.0},
                    {"params": self.side["item"].bias.parameters(), "lr": 3.0, "momentum": 0.5},
                    {"params": self.side["item"].mix.parameters(), "lr": 0.1},
                ]
            ),
        }
        self.u, self.i, self.r = ratings()

    def rows(self, step, size):
        pick = torch.randperm(len(self.r), generator=torch.Generator().manual_seed(1800 + step))[:size]
        return pick[self.u[pick] % self.world == self.rank]

    def predict(self, moving, rows):
        parts = {}
        for name, ids in (("user", self.u[rows]), ("item", self.i[rows])):
            with torch.set_grad_enabled(name == moving):
                parts[name] = self.side[name](ids)
        (pu, bu), (qi, bi) = parts["user"], parts["item"]
        return (pu * qi).sum(1) + bu + bi

    def step(self, step, moving, size):
        rows = self.rows(step, size)
        error = (self.predict(moving, rows) - self.r[rows]).pow(2)
        optim = self.optim[moving]
        # FSDP takes the mean over ranks, we want the sum divided by the number of all rows
        (error.sum() * self.world / size).backward()
        nn.utils.clip_grad_norm_([p for g in optim.param_groups for p in g["params"]], 1.0)
        optim.step()
        optim.zero_grad()
        report = torch.stack([error.detach().sum(), torch.tensor(float(len(rows)))])
        dist.all_reduce(report)
        assert int(report[1]) == size
        return (report[0] / report[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--turn", type=int, default=3)
    ap.add_argument("--batch", type=int, default=120)
    ap.add_argument("--lr", type=float, default=0.03)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Alternation(args)
    for step, moving in turns(args.steps, args.turn):
        loss = run.step(step, moving, args.batch)
        if run.rank == 0:
            print(f"step {step:3d} {moving} moved, squared error {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
