import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tabular import Tabular, TabularNet


class Run:
    """One training run: owns the model, the optimizer, the plateau schedule and the checkpoints."""

    def __init__(self, args):
        self.args, self.step = args, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (self.world,))
        torch.manual_seed(2)
        self.model = TabularNet()
        for col in self.model.trunk:
            fully_shard(col, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optim, factor=0.5, patience=0, threshold=1e-3)
        self.data = Tabular(self.rank, self.world)

    def average(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    def train_step(self):
        cat, num, y = self.data.batch(self.step)
        loss = F.smooth_l1_loss(self.model(cat, num), y)
        self.optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.optim.step()
        self.step += 1
        return loss

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        cat, num, y = self.data.valid()
        loss = F.smooth_l1_loss(self.model(cat, num), y)
        self.model.train()
        return loss

    def fit(self):
        while self.step < self.args.steps:
            loss = self.train_step()
            if self.step % 2 == 0:
                val = self.evaluate()
                mean = self.average(val)
                self.plateau.step(mean)
                train = self.average(loss)
                if self.rank == 0:
                    lr = self.optim.param_groups[0]["lr"]
                    print(f"step {self.step:3d}  train {train:.4f}  valid {mean:.4f}  lr {lr:.2e}", flush=True)
            if self.args.out and self.args.save_every and self.step % self.args.save_every == 0:
                self.save()

    def save(self):
        state = {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optim),
            "plateau": self.plateau.state_dict(),
            "step": self.step,
        }
        dcp.save(state, checkpoint_id=os.path.join(self.args.out, f"{self.step:06d}"))

    def load(self, folder):
        state = {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optim),
            "plateau": self.plateau.state_dict(),
            "step": 0,
        }
        dcp.load(state, checkpoint_id=os.path.join(folder, max(os.listdir(folder))))
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optim, state["optim"])
        self.plateau.load_state_dict(state["plateau"])
        self.step = state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(args)
    if args.resume:
        run.load(args.resume)
    run.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
