"""A dry run before anything is loaded: one pass over a made-up batch, two of them on a rank, its gradients thrown away.

save_args: --save-every 3 --out {checkpoint}
resume_args: --resume {checkpoint}
reshard_to: 1,4
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR

FEATURES, WIDTH, DEPTH = 8, 24, 3
GLOBAL_BATCH, SAMPLES, STEPS = 32, 1024, 20


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Regressor(nn.Module):
    def __init__(self, inputs=FEATURES, width=WIDTH, depth=DEPTH):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def make_dataset():
    gen = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, FEATURES, generator=gen)
    direction = torch.randn(FEATURES, generator=gen)
    y = torch.sin(x @ direction) + x[:, :4].sum(dim=1)
    return x, y[:, None]


def latest_checkpoint(folder):
    complete = [p.parent for p in Path(folder).glob("step_*/.metadata")]
    if not complete:
        raise SystemExit(f"no checkpoint in {folder}")
    return max(complete, key=lambda p: p.name)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", default=None, help="folder with step_* checkpoints")
    return parser.parse_args()


class TrainState(Stateful):
    """Everything that a resumed run needs."""

    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.step = 0

    def state_dict(self):
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state):
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


def dry_run(model):
    """What does not fit into memory fails now; twice, as the second pass shows what the first one leaves."""
    for _ in range(2):
        x = torch.zeros(GLOBAL_BATCH, FEATURES)
        F.mse_loss(model(x), x[:, :1]).backward()
        model.zero_grad()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Regressor()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.9)
    state = TrainState(model, optimizer, scheduler)
    dry_run(model)
    if args.resume:
        dcp.load({"train": state}, checkpoint_id=latest_checkpoint(args.resume))

    x, y = make_dataset()
    local = GLOBAL_BATCH // world
    while state.step < args.steps:
        start = state.step * GLOBAL_BATCH % SAMPLES + rank * local
        loss = F.mse_loss(model(x[start : start + local]), y[start : start + local])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state.step += 1
        if rank == 0:
            print(f"step {state.step} loss {loss.item():.4f}", flush=True)
        if args.save_every and state.step % args.save_every == 0:
            dcp.save({"train": state}, checkpoint_id=Path(args.out) / f"step_{state.step:06d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
