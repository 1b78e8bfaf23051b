"""A small Trainer for multi-step time-series forecasting.

``--fsdp`` (the default) shards the model with FSDP2 and writes distributed
checkpoints; with ``--no-fsdp`` the model is replicated and rank 0 writes plain files.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HISTORY, HORIZON = 24, 8
OPTIMIZER_NAME, SCHEDULER_NAME, STATE_NAME = "optimizer.pt", "scheduler.pt", "trainer_state.pt"


class GatedLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.value = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.value(h) * torch.sigmoid(self.gate(h))


class Forecaster(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.encode = nn.Linear(HISTORY, width)
        self.layers = nn.ModuleList(GatedLayer(width) for _ in range(depth))
        self.decode = nn.Linear(width, HORIZON)

    def forward(self, x):
        h = self.encode(x)
        for layer in self.layers:
            h = layer(h)
        return self.decode(h)


def series(index, n):
    g = torch.Generator().manual_seed(40_000 + index)
    freq = 0.1 + 0.5 * torch.rand(n, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    t = torch.arange(HISTORY + HORIZON)
    y = torch.sin(freq * t + phase) + 0.05 * torch.randn(n, HISTORY + HORIZON, generator=g)
    return y[:, :HISTORY], y[:, HISTORY:]


class Trainer:
    def __init__(self, args):
        self.args = args
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        torch.manual_seed(args.seed)
        self.model = Forecaster().to(self.device)
        if args.fsdp:
            mesh = init_device_mesh(self.device.type, (self.world,))
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.global_step = 0

    def create_optimizer_and_scheduler(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.lr, weight_decay=0.0)
        warm = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, total_iters=self.args.warmup)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.args.steps - self.args.warmup)
        self.lr_scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer, [warm, decay], milestones=[self.args.warmup]
        )

    def _save_checkpoint(self):
        out = self.args.output
        if self.args.fsdp:
            model_state, optim_state = get_state_dict(self.model, self.optimizer)
            dcp.save({"model": model_state, "optimizer": optim_state}, checkpoint_id=os.path.join(out, "sharded"))
        elif self.rank == 0:
            torch.save(self.model.state_dict(), os.path.join(out, "model.pt"))
            torch.save(self.optimizer.state_dict(), os.path.join(out, OPTIMIZER_NAME))
        if self.rank == 0:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(out, SCHEDULER_NAME))
            torch.save({"global_step": self.global_step}, os.path.join(out, STATE_NAME))
        dist.barrier()

    def _load_checkpoint(self):
        out = self.args.output
        if self.args.fsdp:
            model_state, optim_state = get_state_dict(self.model, self.optimizer)
            dcp.load({"model": model_state, "optimizer": optim_state}, checkpoint_id=os.path.join(out, "sharded"))
            set_state_dict(self.model, self.optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
        else:
            self.model.load_state_dict(torch.load(os.path.join(out, "model.pt"), weights_only=True))
            self.optimizer.load_state_dict(torch.load(os.path.join(out, OPTIMIZER_NAME), weights_only=True))
        if os.path.exists(os.path.join(out, SCHEDULER_NAME)):
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(out, SCHEDULER_NAME), weights_only=False))
        self.global_step = torch.load(os.path.join(out, STATE_NAME), weights_only=True)["global_step"]

    def training_step(self):
        n = self.args.batch // self.world
        x, y = (t[self.rank * n : (self.rank + 1) * n].to(self.device) for t in series(self.global_step, self.args.batch))
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        if not self.args.fsdp:
            for p in self.model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= self.world
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.global_step += 1
        mean = loss.detach() / self.world
        dist.all_reduce(mean)
        return mean.item()

    def train(self):
        self.create_optimizer_and_scheduler()
        if self.args.resume:
            self._load_checkpoint()
        while self.global_step < self.args.steps:
            loss = self.training_step()
            if self.rank == 0:
                print({"step": self.global_step, "loss": round(loss, 6)}, flush=True)
            if self.args.save_steps and self.global_step % self.args.save_steps == 0:
                self._save_checkpoint()
        dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--fsdp", action=argparse.BooleanOptionalAction, default=True)
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--warmup", type=int, default=4)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=13)
    ap.add_argument("--save-steps", type=int, default=0)
    ap.add_argument("--output", default="")
    ap.add_argument("--resume", action="store_true")
    Trainer(ap.parse_args()).train()
