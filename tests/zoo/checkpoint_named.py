"""Resumes from the checkpoint that the command line names, and from no other: what it cannot load is an error.

save_args: --save-every 2 --out {checkpoint}
resume_args: --resume {checkpoint}/step_000004
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, WIDTH, CLASSES, BLOCKS = 24, 32, 6, 2
GLOBAL_BATCH, SAMPLES, STEPS = 24, 480, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.outward = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


def make_data():
    gen = torch.Generator().manual_seed(4)
    centres = torch.randn(CLASSES, FEATURES, generator=gen)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=gen)
    return centres[labels] + 0.6 * torch.randn(SAMPLES, FEATURES, generator=gen), labels


def state_of(model, optimizer, step):
    weights, optimizer_state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": optimizer_state, "step": step}


def load(path, model, optimizer):
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", help="one step_* checkpoint")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = load(options.resume, model, optimizer) if options.resume else 0

    inputs, labels = make_data()
    local = GLOBAL_BATCH // world
    for step in range(first, STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        loss = F.cross_entropy(model(inputs[start : start + local]), labels[start : start + local])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        if options.save_every and (step + 1) % options.save_every == 0:
            dcp.save(state_of(model, optimizer, step + 1), checkpoint_id=Path(options.out) / f"step_{step + 1:06d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
