"""Gradient boosting with networks as weak learners (GrowNet): stages of fitting, line search and joint correction."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weak import Ensemble, new_learner

STAGES, FIT_STEPS, FIX_STEPS = 3, 6, 3
BATCH, SEED = 96, 4


def make_table(n=1152, columns=8):
    g = torch.Generator().manual_seed(6)
    x = torch.randn(n, columns, generator=g)
    f = x[:, 0] * x[:, 1] + (x[:, 2] > 0.5).float() * 2 - x[:, 3].abs() + 0.5 * x[:, 4]
    y = (torch.rand(n, generator=g) < torch.sigmoid(1.5 * f)).float()
    return x, y[:, None]


class Rows:
    """The n-th global batch of the whole training; the position is part of the checkpoint."""

    def __init__(self, n, rank, world):
        self.n, self.rank, self.world, self.drawn = n, rank, world, 0

    def next(self):
        per_epoch = self.n // BATCH
        epoch, at = divmod(self.drawn, per_epoch)
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(SEED + epoch))
        self.drawn += 1
        return order[at * BATCH:(at + 1) * BATCH][self.rank::self.world]


class Booster:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.x, self.y = make_table()
        self.rows = Rows(len(self.x), self.rank, self.world)
        self.ens = Ensemble()
        prior = self.y.mean()
        self.ens.bias = torch.log(prior / (1 - prior)).item()
        self.stage, self.phase, self.k, self.total = 0, "fit", 0, 0
        self.opt = None

    # ---- phases
    def open_stage(self):
        self.ens.learners.append(new_learner(self.stage, self.x.shape[1], SEED))
        self.ens.rates.append(0.0)
        self.open_phase()

    def open_phase(self):
        if self.phase == "fit":
            params = list(self.ens.learners[-1].parameters())
            self.opt = torch.optim.Adam(params, lr=0.02, eps=1e-5)
        else:
            self.opt = torch.optim.SGD(self.ens.parameters(), lr=0.05, momentum=0.5)

    def fit_step(self):
        """Weighted least squares against the Newton step of the logistic loss."""
        rows = self.rows.next()
        x, y = self.x[rows], self.y[rows]
        with torch.no_grad():
            score, carry = self.ens(x, upto=self.stage)
            p = torch.sigmoid(score)
            hess = (p * (1 - p)).clamp_min(1e-3)
            target = (y - p) / hess
            weight_sum = hess.sum()
            dist.all_reduce(weight_sum)
        out, _ = self.ens.learners[-1](x, carry)
        return (hess * (out - target) ** 2).sum() / weight_sum * self.world

    @torch.no_grad()
    def line_search(self):
        """One Newton step for the rate of the new learner, over the whole training set."""
        x, y = self.x[self.rank::self.world], self.y[self.rank::self.world]
        score, carry = self.ens(x, upto=self.stage)
        out, _ = self.ens.learners[-1](x, carry)
        p = torch.sigmoid(score).double()
        sums = torch.stack([((y - p) * out).sum(), (p * (1 - p) * out ** 2).sum()])
        dist.all_reduce(sums)
        self.ens.rates[-1] = 0.5 * (sums[0] / sums[1]).item()

    def fix_step(self):
        rows = self.rows.next()
        return F.binary_cross_entropy_with_logits(self.ens(self.x[rows])[0], self.y[rows])

    def run(self):
        if not self.ens.learners:
            self.open_stage()
        while True:
            loss = self.fit_step() if self.phase == "fit" else self.fix_step()
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.k += 1
            self.total += 1
            if self.args.save_every and self.total % self.args.save_every == 0:
                self.save()
            if self.phase == "fit" and self.k == FIT_STEPS:
                self.line_search()
                self.phase, self.k = "fix", 0
                self.open_phase()
            elif self.phase == "fix" and self.k == FIX_STEPS:
                self.report()
                self.stage, self.phase, self.k = self.stage + 1, "fit", 0
                if self.stage == STAGES:
                    return
                self.open_stage()

    @torch.no_grad()
    def report(self):
        x, y = self.x[self.rank::self.world], self.y[self.rank::self.world]
        nll = F.binary_cross_entropy_with_logits(self.ens(x)[0], y, reduction="sum")
        dist.all_reduce(nll)
        if self.rank == 0:
            rates = " ".join(f"{r:.5f}" for r in self.ens.rates)
            print(f"stage {self.stage} steps {self.total} nll {nll.item() / len(self.x):.6f} rates {rates}")

    # ---- checkpoints
    def save(self):
        os.makedirs(self.args.out, exist_ok=True)
        torch.save({"progress": (self.stage, self.phase, self.k, self.total, self.rows.drawn),
                    "rates": self.ens.rates, "learners": [m.state_dict() for m in self.ens.learners],
                    "opt": self.opt.state_dict()},
                   os.path.join(self.args.out, f"boost.{self.total:04d}.rank{self.rank}"))

    def load(self, folder):
        name = max(n for n in os.listdir(folder) if n.endswith(f".rank{self.rank}"))
        s = torch.load(os.path.join(folder, name), weights_only=False)
        stage, phase, k, total, drawn = s["progress"]
        for self.stage in range(stage + 1):
            self.ens.learners.append(new_learner(self.stage, self.x.shape[1], SEED))
            self.ens.learners[-1].load_state_dict(s["learners"][self.stage])
        self.phase, self.k, self.total, self.rows.drawn = phase, k, total, drawn
        self.ens.rates = s["rates"]
        self.open_phase()
        self.opt.load_state_dict(s["opt"])
        # a checkpoint taken at the last step of a phase is continued behind the phase change
        if phase == "fit" and k == FIT_STEPS:
            self.line_search()
            self.phase, self.k = "fix", 0
            self.open_phase()
        elif phase == "fix" and k == FIX_STEPS:
            self.stage, self.phase, self.k = stage + 1, "fit", 0
            if self.stage < STAGES:
                self.open_stage()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    booster = Booster(args)
    if args.resume:
        booster.load(args.resume)
    if booster.stage < STAGES:
        booster.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
