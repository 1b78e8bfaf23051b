"""Gradient boosting of small networks (GrowNet) on tabular data.

Stage by stage a new learner is built, sharded and fitted to the Newton residual of the ensemble so far;
it sees the raw columns and the last hidden layer of its predecessor.  Earlier learners are frozen.  The
rate of a finished learner comes from a line search over the whole training set.
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

COLUMNS, HIDDEN = 10, 16


class WeakLearner(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(COLUMNS + extra, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        h = self.hidden(x)
        return self.out(h), h


class Ensemble:
    def __init__(self, bias):
        self.bias = bias
        self.learners, self.rates = [], []

    def grow(self):
        stage = len(self.learners)
        torch.manual_seed(1000 + stage)
        learner = WeakLearner(HIDDEN if stage else 0)
        fully_shard(learner)
        self.learners.append(learner)
        self.rates.append(1.0)
        return learner

    def forward_frozen(self, x, stages):
        """Score after the given number of stages and the last hidden layer."""
        score, h = torch.full((len(x),), self.bias), x[:, :0]
        with torch.no_grad():
            for learner, rate in zip(self.learners[:stages], self.rates):
                out, h = learner(torch.cat([x, h], dim=1))
                score = score + rate * out[:, 0]
        return score, h


def make_table(rows=1200):
    g = torch.Generator().manual_seed(12)
    x = torch.randn(rows, COLUMNS, generator=g)
    logit = 1.5 * x[:, 0] * x[:, 1] + torch.sin(3 * x[:, 2]) + (x[:, 3] > 0.5) * 1.2 - 0.4
    y = (torch.rand(rows, generator=g) < torch.sigmoid(logit)).float()
    return x, y


def newton(score, y):
    p = torch.sigmoid(score)
    weight = (p * (1 - p)).clamp(min=1e-3)
    return (y - p) / weight, weight


def line_search(score, out, y):
    """Three Newton steps on the rate; sums over the rows of all ranks."""
    rate = 0.0
    for _ in range(3):
        p = torch.sigmoid(score + rate * out)
        sums = torch.stack([((y - p) * out).double().sum(), (p * (1 - p) * out * out).double().sum()])
        dist.all_reduce(sums)
        rate += (sums[0] / (sums[1] + 1e-6)).item()
    return rate


def logloss(score, y, total_rows):
    value = nn.functional.binary_cross_entropy_with_logits(score, y, reduction="sum").double()
    dist.all_reduce(value)
    return value.item() / total_rows


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--stages", type=int, default=4)
    ap.add_argument("--steps", type=int, default=10, help="optimizer steps for each stage")
    ap.add_argument("--batch", type=int, default=240)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="grownet")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_table()
    my_x, my_y = x.chunk(world)[rank], y.chunk(world)[rank]
    base = y.mean().clamp(0.01, 0.99)
    ensemble = Ensemble(torch.log(base / (1 - base)).item())

    saved = None
    stage0 = 0
    if args.resume:
        newest = max(int(f[1:].split("_")[0]) for f in os.listdir(args.resume))
        saved = torch.load(os.path.join(args.resume, f"s{newest}_{rank}.pt"), weights_only=False)
        for weights in saved["learners"]:
            ensemble.grow().load_state_dict(weights)
        ensemble.rates = saved["rates"]
        stage0 = len(ensemble.learners) - 1

    for stage in range(stage0, args.stages):
        learner = ensemble.learners[stage] if saved else ensemble.grow()
        opt = torch.optim.Adam(learner.parameters(), lr=0.01)
        first = 0
        if saved:
            opt.load_state_dict(saved["opt"])
            first, saved = saved["step"], None
        for step in range(first, args.steps):
            g = torch.Generator().manual_seed(stage * 1000 + step)
            rows = torch.randperm(len(x), generator=g)[: args.batch].chunk(world)[rank]
            score, h = ensemble.forward_frozen(x[rows], stage)
            residual, weight = newton(score, y[rows])
            out, _ = learner(torch.cat([x[rows], h], dim=1))
            weight_sum = weight.sum()
            dist.all_reduce(weight_sum)
            loss = (weight * (out[:, 0] - residual) ** 2).sum() / weight_sum * world
            opt.zero_grad()
            loss.backward()
            opt.step()
            done = stage * args.steps + step + 1
            if args.save_every and done % args.save_every == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(
                    {
                        "learners": [m.state_dict() for m in ensemble.learners],
                        "rates": list(ensemble.rates),
                        "opt": opt.state_dict(),
                        "step": step + 1,
                    },
                    os.path.join(args.out, f"s{done}_{rank}.pt"),
                )
        # finish the stage
        score, h = ensemble.forward_frozen(my_x, stage)
        with torch.no_grad():
            out = learner(torch.cat([my_x, h], dim=1))[0][:, 0]
        ensemble.rates[stage] = line_search(score, out, my_y)
        learner.requires_grad_(False)
        value = logloss(score + ensemble.rates[stage] * out, my_y, len(x))
        if rank == 0:
            print(f"stage {stage} rate {ensemble.rates[stage]:.6f} train logloss {value:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
