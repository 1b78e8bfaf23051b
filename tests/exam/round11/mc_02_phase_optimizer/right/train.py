"""Forecasting with missing observations, in phases: each phase has an optimizer and a schedule of its own."""
import argparse
import glob
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from net import Forecaster
from series import BatchPlan, make_panel


@dataclass
class Phase:
    name: str
    steps: int
    lr: float
    momentum: float


@dataclass
class Config:
    phases: tuple = (Phase("base", 8, 0.03, 0.9), Phase("finetune", 10, 0.02, 0.8))
    batch: int = 32
    max_norm: float = 2.0
    seed: int = 5


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model = Forecaster()
        fully_shard(self.model.rnn)
        fully_shard(self.model)
        x, seen, self.t0 = make_panel()
        held = torch.arange(len(x)) % 5 == 0
        self.x, self.seen = x[~held], seen[~held]
        self.val_x, self.val_seen = x[held], seen[held]
        self.plan = BatchPlan(len(self.x), cfg.batch, cfg.seed)
        self.step = 0
        self.phase = 0
        self.start_phase()

    def start_phase(self):
        p = self.cfg.phases[self.phase]
        self.opt = torch.optim.SGD(self.model.parameters(), lr=p.lr, momentum=p.momentum)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, p.steps, eta_min=p.lr / 10)

    def phase_end(self):
        return sum(p.steps for p in self.cfg.phases[:self.phase + 1])

    def split(self, rows, x, seen):
        rows = rows.chunk(self.world)[self.rank]
        x, seen = x[rows], seen[rows]
        return x[:, :self.t0], seen[:, :self.t0], x[:, self.t0:], seen[:, self.t0:]

    def masked_error(self, rows, x, seen):
        """Squared error of the own rows and the number of observed points of all ranks."""
        past, past_seen, future, observed = self.split(rows, x, seen)
        err = ((self.model(past, past_seen) - future) ** 2 * observed).sum()
        count = observed.sum()
        dist.all_reduce(count)
        return err, count

    def train_step(self):
        err, count = self.masked_error(self.plan.global_batch(self.step), self.x, self.seen)
        loss = err / count * self.world
        self.opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
        self.opt.step()
        self.sched.step()
        self.step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / self.world

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        err, count = self.masked_error(torch.arange(len(self.val_x)), self.val_x, self.val_seen)
        dist.all_reduce(err)
        self.model.train()
        # no backward follows which would do it
        self.model.reshard()
        return (err / count).item()

    def save(self, folder):
        os.makedirs(folder, exist_ok=True)
        torch.save({"step": self.step, "phase": self.phase, "model": self.model.state_dict(),
                    "opt": self.opt.state_dict(), "sched": self.sched.state_dict()},
                   os.path.join(folder, f"s{self.step:04d}.rank{self.rank}.pt"))

    def resume(self, folder):
        path = sorted(glob.glob(os.path.join(folder, f"s*.rank{self.rank}.pt")))[-1]
        state = torch.load(path, weights_only=False)
        self.step, self.phase = state["step"], state["phase"]
        self.model.load_state_dict(state["model"])
        self.start_phase()
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="runs")
    p.add_argument("--resume")
    a = p.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(Config())
    if a.resume:
        trainer.resume(a.resume)
    while True:
        if trainer.step == trainer.phase_end():
            score = trainer.validate()
            if trainer.rank == 0:
                print(f"end of phase {trainer.cfg.phases[trainer.phase].name}: validation mse {score:.5f}")
            trainer.phase += 1
            if trainer.phase == len(trainer.cfg.phases):
                break
            trainer.start_phase()
        loss = trainer.train_step()
        if trainer.rank == 0 and trainer.step % 3 == 0:
            print(f"step {trainer.step:3d} masked mse {loss:.5f}")
        if a.save_every and trainer.step % a.save_every == 0:
            trainer.save(a.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
