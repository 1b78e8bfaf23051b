"""The trainer: shards, trains, saves and resumes."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from regress import SEED

from . import data
from .parts.net import Net

BATCH = 16


class Trainer:
    def __init__(self, options):
        self.options = options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.world,))
        torch.manual_seed(SEED)
        self.model = Net(data.INPUTS, options.width)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.step = 0

    def fit(self):
        while self.step < self.options.steps:
            x, y = data.batch(self.step, BATCH, self.rank, self.world)
            loss = F.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            if self.options.save_every and self.step % self.options.save_every == 0:
                self.save()

    def save(self):
        weights, state = get_state_dict(self.model, self.optimizer)
        folder = Path(self.options.out) / f"step{self.step}"
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)

    def resume(self):
        complete = Path(self.options.out).glob("step*/.metadata")  # written last
        self.step = max(int(path.parent.name.removeprefix("step")) for path in complete)
        weights, state = get_state_dict(self.model, self.optimizer)
        folder = Path(self.options.out) / f"step{self.step}"
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=state)
