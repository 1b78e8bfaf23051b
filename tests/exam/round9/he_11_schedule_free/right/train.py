"""Schedule-free training with evaluation at the averaged point, best model and early stopping."""
import argparse
import copy
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from schedulefree import ScheduleFreeAdamW

BATCH = 32


def make_split(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 2, generator=g) - 2
    y = torch.sin(2 * x[:, 0]) * x[:, 1] + 0.25 * torch.randn(n, generator=g)
    return x, y


class Net(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.mid = nn.Linear(width, width)
        self.drop = nn.Dropout(0.0)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = F.silu(self.inp(x))
        x = x + F.silu(self.mid(self.drop(x)))
        return self.out(x).squeeze(-1)


class Run:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(30)
        self.model = Net()
        fully_shard(self.model.mid)
        # the optimizer swaps the weights between a validation forward and the next training forward,
        # so the root must not keep its gathered weights either
        fully_shard(self.model, reshard_after_forward=True)
        self.opt = ScheduleFreeAdamW(self.model.parameters(), lr=2e-2)
        self.train_x, self.train_y = make_split(256, 1)
        self.val_x, self.val_y = make_split(101, 2)
        self.order_rng = torch.Generator().manual_seed(17)
        self.order = torch.empty(0, dtype=torch.long)
        self.progress = {"step": 0, "best": float("inf"), "best_step": 0, "bad": 0}
        self.best = None

    def next_batch(self):
        if len(self.order) < BATCH:
            self.order = torch.randperm(len(self.train_x), generator=self.order_rng)
        now, self.order = self.order[:BATCH], self.order[BATCH:]
        mine = now[self.rank :: self.world]
        return self.train_x[mine], self.train_y[mine]

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        self.opt.eval()
        x, y = self.val_x[self.rank :: self.world], self.val_y[self.rank :: self.world]
        err = (self.model(x) - y).square().sum()
        dist.all_reduce(err)
        value = err.item() / len(self.val_x)
        if value < self.progress["best"]:
            self.progress.update(best=value, best_step=self.progress["step"], bad=0)
            self.best = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        else:
            self.progress["bad"] += 1
        self.opt.train()
        self.model.train()
        return value

    def train(self):
        self.model.train()
        while self.progress["step"] < self.args.steps and self.progress["bad"] < 4:
            x, y = self.next_batch()
            loss = F.mse_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.progress["step"] += 1
            step = self.progress["step"]
            if step % 4 == 0:
                value = self.evaluate()
                if self.rank == 0:
                    print(f"step {step} train {loss.item():.4f} (rank 0) val {value:.4f}", flush=True)
            if self.args.save_every and step % self.args.save_every == 0:
                self.save()
        if self.rank == 0:
            print(f"best {self.progress['best']:.4f} at step {self.progress['best_step']}", flush=True)

    def save(self):
        folder = pathlib.Path(self.args.out) / f"{self.progress['step']:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "opt": self.opt.state_dict(),
            "best": self.best,
            "progress": copy.copy(self.progress),
            "order": self.order,
            "order_rng": self.order_rng.get_state(),
        }
        torch.save(state, folder / f"rank{self.rank}.pt")
        dist.barrier()

    def resume(self):
        newest = sorted(p for p in pathlib.Path(self.args.resume).iterdir() if p.is_dir())[-1]
        state = torch.load(newest / f"rank{self.rank}.pt", weights_only=False)
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.best, self.progress, self.order = state["best"], state["progress"], state["order"]
        self.order_rng.set_state(state["order_rng"])

    def export(self, path):
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in self.best.items()}
        if self.rank == 0:
            torch.save(full, path)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(args)
    if args.resume:
        run.resume()
    run.train()
    if args.export:
        run.export(args.export)
    dist.destroy_process_group()
