"""Training without gradients: the weights are tried on both sides of a direction, and moved along it. Saves files of its own.

save_args: --save-every 4 --out {checkpoint}
resume_args: --resume {checkpoint}
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

GLOBAL_BATCH, STEPS, EPSILON, RATE = 32, 12, 1e-2, 3e-2


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))
    fully_shard(model[0])
    return fully_shard(model, reshard_after_forward=True)  # the weights change between forwards without a backward


def batch_of(step):
    gen = torch.Generator().manual_seed(100 + step)
    x = torch.randn(GLOBAL_BATCH, 8, generator=gen)
    return x, x[:, :3].argmax(1)


def move(model, seed, amount):
    """Along the direction of a seed, drawn for whole parameters so that it does not depend on the ranks."""
    gen = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        direction = torch.randn(param.shape, generator=gen)
        param.add_(distribute_tensor(direction, param.device_mesh, param.placements), alpha=amount)


def loss_of(model, x, y):
    total = F.cross_entropy(model(x), y, reduction="sum").double()
    dist.all_reduce(total)
    return total.item() / GLOBAL_BATCH


def save(folder, model, step, rate):
    whole = {name: param.full_tensor().tolist() for name, param in model.named_parameters()}
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{step:04d}.json").write_text(json.dumps({"step": step, "rate": rate, "weights": whole}))
    dist.barrier()


def load(folder, model):
    saved = json.loads(max(folder.glob("*.json")).read_text())
    for name, param in model.named_parameters():
        whole = torch.tensor(saved["weights"][name])
        param.copy_(distribute_tensor(whole, param.device_mesh, param.placements))
    return saved["step"], saved["rate"]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    start, rate = load(Path(args.resume), model) if args.resume else (0, RATE)
    for step in range(start, STEPS):
        x, y = (part.chunk(world)[rank] for part in batch_of(step))
        move(model, step, EPSILON)
        up = loss_of(model, x, y)
        move(model, step, -2 * EPSILON)
        down = loss_of(model, x, y)
        slope = (up - down) / (2 * EPSILON)
        move(model, step, EPSILON - rate * slope)
        rate *= 0.97
        if args.save_every and (step + 1) % args.save_every == 0:
            save(Path(args.out), model, step + 1, rate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
