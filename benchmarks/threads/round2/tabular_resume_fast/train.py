"""Regression on synthetic tabular data, with a checkpoint that has two ways of loading.

If the run that loads has the settings of the run that saved, every rank reads back its
own file; otherwise the weights are taken from the distributed part of the checkpoint.
"""
import argparse
import json
import os
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

FEATURES = 20


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TabularNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def table(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=gen)
    y = torch.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2] - 0.5 * x[:, 3].abs()
    return x, y + 0.05 * torch.randn(n, generator=gen)


def describe(args):
    """What a checkpoint must agree on to be read back file by file."""
    return {
        "model": {"width": args.width, "depth": args.depth, "features": FEATURES},
        "optimizer": {"name": "adamw", "lr": args.lr},
        "distributed": {"world_size": dist.get_world_size(), "rank": dist.get_rank(),
                        "backend": dist.get_backend()},
    }


def save(root, model, optimizer, step, args):
    root = pathlib.Path(root)
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state}, checkpoint_id=root / "weights")
    torch.save({"model": model_state, "optim": optim_state}, root / f"rank_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        (root / "metadata.json").write_text(json.dumps({"step": step, "config": describe(args)}))
    dist.barrier()


def load(root, model, optimizer, args, device):
    root = pathlib.Path(root)
    metadata = json.loads((root / "metadata.json").read_text())
    same_format = metadata["config"] == describe(args)
    # the ranks have to load in the same way; rank 0 wrote the metadata and decides
    flag = torch.tensor(int(same_format), device=device)
    dist.broadcast(flag, src=0)
    same_format = bool(flag.item())
    if same_format:
        state = torch.load(root / f"rank_{dist.get_rank()}.pt", weights_only=False)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
    else:
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=root / "weights")
        set_model_state_dict(model, state["model"])
    if dist.get_rank() == 0:
        print(f"loaded step {metadata['step']} ({'own files' if same_format else 'weights only'})")
    return metadata["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", default=None)
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--load", default=None)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = TabularNet(args.width, args.depth).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    first = load(args.load, model, optimizer, args, device) if args.load else 0

    for step in range(first, args.steps):
        x, y = table(args.batch_size, 500 + step)
        x, y = x[rank::world].to(device), y[rank::world].to(device)
        loss = (model(x) - y).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step + 1) % 4 == 0:
            print(f"step {step + 1:3d}  mse {shown.item() / world:.6f}", flush=True)
        if args.save_at and step + 1 == args.save_at:
            save(args.out, model, optimizer, step + 1, args)

    with torch.no_grad():
        x, y = table(256, 7)
        error = (model(x[rank::world].to(device)) - y[rank::world].to(device)).square().mean()
        dist.all_reduce(error)
    if rank == 0:
        print(f"test mse {error.item() / world:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
