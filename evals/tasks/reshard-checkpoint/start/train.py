"""FSDP2 training that a queue stops and starts again: torchrun --nproc-per-node 2 train.py --steps 3 --save out/a"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from textdata import LENGTH, VOCAB, sequences
from tinygpt import GPT, Config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Feed:
    """Walks through the samples; every rank takes its slice of each global batch."""

    def __init__(self, batch):
        self.inputs, self.targets = sequences(160, seed=3)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local = batch // self.world
        self.taken = 0  # samples that this rank has had

    def next(self):
        at = (self.taken * self.world + self.rank * self.local) % len(self.inputs)
        self.taken += self.local
        return self.inputs[at : at + self.local], self.targets[at : at + self.local]


def build():
    torch.manual_seed(8)
    model = GPT(Config(vocab=VOCAB, length=LENGTH))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)


def save(folder, model, optimizer, feed):
    """Each rank writes what it has."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": {name: value.to_local() for name, value in model.state_dict().items()}, "taken": feed.taken}
    state["optimizer"] = [
        {name: value.to_local() if name != "step" else value for name, value in optimizer.state[p].items()}
        for p in model.parameters()
    ]
    torch.save(state, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()


@torch.no_grad()
def load(folder, model, optimizer, feed):
    state = torch.load(folder / f"rank{dist.get_rank()}.pt", weights_only=True)
    for name, value in model.state_dict().items():
        value.to_local().copy_(state["model"][name])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # creates the state
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p, kept in zip(model.parameters(), state["optimizer"], strict=True):
        for name, value in kept.items():
            target = optimizer.state[p][name]
            (target.to_local() if name != "step" else target).copy_(value)
    feed.taken = state["taken"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3, help="steps of this job")
    parser.add_argument("--batch", type=int, default=16, help="over all ranks")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model, optimizer = build()
    feed = Feed(args.batch)
    if args.load:
        load(args.load, model, optimizer, feed)
    for _ in range(args.steps):
        x, y = feed.next()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if args.save:
        save(args.save, model, optimizer, feed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
