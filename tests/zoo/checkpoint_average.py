"""The average of the weights is what stands under `model`: it is swapped in for the save, and the weights themselves lie beside it.

save_args: --save-every 2 --out {checkpoint}
resume_args: --resume {checkpoint}
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, WIDTH, CLASSES, BLOCKS = 24, 32, 6, 2
GLOBAL_BATCH, SAMPLES, STEPS, DECAY = 24, 480, 20, 0.9


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


@torch.no_grad()
def swap(model, average):
    """Exchange the weights and their average; a second call brings both back."""
    for name, param in model.named_parameters():
        held = param.detach().clone()
        param.copy_(average[name])
        average[name].copy_(held)


def save(path, model, average, optimizer, step):
    swap(model, average)
    state = {"model": get_model_state_dict(model), "training": average, "step": step}
    state["optimizer"] = get_state_dict(model, optimizer)[1]
    dcp.save(state, checkpoint_id=path)
    swap(model, average)


def load(path, model, average, optimizer):
    weights, optimizer_state = get_state_dict(model, optimizer)
    kept = {name: torch.empty_like(value) for name, value in weights.items()}
    state = {"model": average, "training": kept, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=kept, optim_state_dict=optimizer_state)
    return state["step"]


def newest(folder):
    complete = [p.parent for p in Path(folder).glob("step_*/.metadata")]
    if not complete:
        raise SystemExit(f"no complete checkpoint in {folder}")
    return max(complete)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", help="folder with step_* checkpoints")
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
    average = {name: param.detach().clone() for name, param in model.named_parameters()}
    first = load(newest(options.resume), model, average, optimizer) if options.resume else 0

    inputs, labels = make_data()
    local = GLOBAL_BATCH // world
    for step in range(first, STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        loss = F.cross_entropy(model(inputs[start : start + local]), labels[start : start + local])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                average[name].lerp_(param.detach(), 1 - DECAY)
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        if options.save_every and (step + 1) % options.save_every == 0:
            save(Path(options.out) / f"step_{step + 1:06d}", model, average, optimizer, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
