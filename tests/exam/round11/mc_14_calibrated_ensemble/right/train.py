"""Bagged ensemble with calibrated probabilities.

Phase 1 trains the members together, each on its own Poisson bootstrap of the rows; phase 2 freezes them and fits a
vector scaling (one slope per class and one bias per class) of the averaged logits by damped Newton steps.
"""
import argparse
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

CLASSES, COLUMNS = 4, 10


@dataclass
class Settings:
    members: int = 3
    train_steps: int = 14
    newton_steps: int = 5
    batch: int = 96
    lrs: list = field(default_factory=lambda: [0.01, 0.006, 0.004])
    seed: int = 19


def make_data(n=1400, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, COLUMNS, generator=g)
    w1, w2 = torch.randn(COLUMNS, 16, generator=g) / 3, torch.randn(16, CLASSES, generator=g)
    y = torch.multinomial((torch.tanh(x @ w1) @ w2).softmax(-1), 1, generator=g)[:, 0]
    return (x[:960], y[:960]), (x[960:1200], y[960:1200]), (x[1200:], y[1200:])


def make_member(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(COLUMNS, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    fully_shard(net[2])
    # scored without gradient in phase 2, stays sharded between the uses
    return fully_shard(net, reshard_after_forward=True)


class VectorScaling:
    """Replicated on all ranks; the sums of the Newton system are reduced, so the copies stay equal."""

    def __init__(self):
        self.theta = torch.cat([torch.ones(CLASSES), torch.zeros(CLASSES)]).double()

    def apply(self, logits):
        return logits.double() * self.theta[:CLASSES] + self.theta[CLASSES:]

    def newton(self, logits, y, ridge=1e-2):
        z = logits.double()
        p = self.apply(z).softmax(-1)
        err = p - F.one_hot(y, CLASSES)
        grad = torch.cat([(err * z).sum(0), err.sum(0)])
        cov = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        zz = z[:, :, None] * z[:, None, :]
        top = torch.cat([(cov * zz).sum(0), (cov * z[:, :, None]).sum(0)], dim=1)
        low = torch.cat([(cov * z[:, None, :]).sum(0), cov.sum(0)], dim=1)
        nll = -self.apply(z).log_softmax(-1)[torch.arange(len(y)), y].sum()
        packed = torch.cat([grad, torch.cat([top, low]).flatten(), nll[None], torch.tensor([float(len(y))])])
        dist.all_reduce(packed)
        k = 2 * CLASSES
        n = packed[-1]
        grad, hess, nll = packed[:k] / n, packed[k:k + k * k].view(k, k) / n, packed[-2] / n
        prior = torch.cat([torch.ones(CLASSES), torch.zeros(CLASSES)]).double()
        grad = grad + ridge * (self.theta - prior)
        self.theta = self.theta - torch.linalg.solve(hess + ridge * torch.eye(k, dtype=torch.float64), grad)
        return nll.item()


class Job:
    def __init__(self, cfg, args):
        self.cfg, self.args = cfg, args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.train, self.calib, self.test = make_data()
        self.members = [make_member(cfg.seed + i) for i in range(cfg.members)]
        self.optims = [torch.optim.AdamW(m.parameters(), lr=lr, eps=1e-6)
                       for m, lr in zip(self.members, cfg.lrs)]
        self.scaling = VectorScaling()
        self.t = 0      # steps of both phases

    def bootstrap(self, member):
        """Poisson(1) weights of all training rows, fixed per member and equal on every rank."""
        g = torch.Generator().manual_seed(900 + member)
        return torch.poisson(torch.ones(len(self.train[0])), generator=g)

    def train_step(self):
        x, y = self.train
        losses = torch.zeros(self.cfg.members)
        for i, (net, opt) in enumerate(zip(self.members, self.optims)):
            g = torch.Generator().manual_seed((self.t * 31 + i) * 7 + 5)
            rows = torch.randperm(len(x), generator=g)[:self.cfg.batch]
            weight = self.bootstrap(i)[rows]
            total = weight.sum()
            rows, weight = rows[self.rank::self.world], weight[self.rank::self.world]
            nll = F.cross_entropy(net(x[rows]), y[rows], reduction="none")
            loss = (nll * weight).sum() / total * self.world
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses[i] = loss.detach() / self.world
        dist.all_reduce(losses)
        return losses.mean().item()

    @torch.no_grad()
    def mean_logits(self, x):
        return sum(m(x) for m in self.members) / len(self.members)

    @torch.no_grad()
    def calibration_step(self):
        x, y = (v[self.rank::self.world] for v in self.calib)
        return self.scaling.newton(self.mean_logits(x), y)

    @torch.no_grad()
    def expected_calibration_error(self, bins=8):
        x, y = (v[self.rank::self.world] for v in self.test)
        conf, guess = self.scaling.apply(self.mean_logits(x)).softmax(-1).max(-1)
        slot = (conf * bins).long().clamp_max(bins - 1)
        table = torch.zeros(3, bins, dtype=torch.float64)
        for row, v in enumerate((torch.ones_like(conf), conf, (guess == y).double())):
            table[row].index_add_(0, slot, v)
        dist.all_reduce(table)
        return ((table[1] - table[2]).abs().sum() / table[0].sum()).item()

    def run(self):
        end = self.cfg.train_steps + self.cfg.newton_steps
        while self.t < end:
            phase = "fit" if self.t < self.cfg.train_steps else "calibrate"
            value = self.train_step() if phase == "fit" else self.calibration_step()
            self.t += 1
            if self.rank == 0 and (self.t % 4 == 0 or phase == "calibrate"):
                print(f"{phase} {self.t} nll {value:.6f}")
            if self.args.save_every and self.t % self.args.save_every == 0:
                self.save()
        ece = self.expected_calibration_error()
        if self.rank == 0:
            print("scaling", [round(v, 5) for v in self.scaling.theta.tolist()], f"test ECE {ece:.5f}")

    def save(self):
        os.makedirs(self.args.out, exist_ok=True)
        torch.save({"t": self.t, "theta": self.scaling.theta, "members": [m.state_dict() for m in self.members],
                    "optims": [o.state_dict() for o in self.optims]},
                   os.path.join(self.args.out, f"job-{self.rank}-{self.t:04d}.pt"))

    def load(self, folder):
        name = max(n for n in os.listdir(folder) if n.startswith(f"job-{self.rank}-"))
        s = torch.load(os.path.join(folder, name), weights_only=False)
        self.t, self.scaling.theta = s["t"], s["theta"]
        for m, d in zip(self.members, s["members"]):
            m.load_state_dict(d)
        for o, d in zip(self.optims, s["optims"]):
            o.load_state_dict(d)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    job = Job(Settings(), args)
    if args.resume:
        job.load(args.resume)
    job.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
