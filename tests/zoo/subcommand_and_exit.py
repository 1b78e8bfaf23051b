"""`train` is a subcommand, main is wrapped in elastic's `record`, and the script takes its process group down and exits by itself.

args: train --steps 5 --lr 0.05
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard

BATCH = 16


def parse():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    train_parser = commands.add_parser("train")
    train_parser.add_argument("--steps", type=int, default=100)
    train_parser.add_argument("--lr", type=float, default=0.01)
    train_parser.set_defaults(run=train)
    commands.add_parser("info").set_defaults(run=info)
    return parser.parse_args()


def build():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def info(options):
    print(sum(p.numel() for p in build().parameters()), "parameters")


def train(options):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = build()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    generator = torch.Generator().manual_seed(1)
    for _ in range(options.steps):
        x = torch.randn(BATCH, 4, generator=generator)
        x, y = x.chunk(world)[rank], x.argmax(dim=1).clamp(max=2).chunk(world)[rank]
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


@record
def main():
    options = parse()
    options.run(options)
    sys.exit(0)


if __name__ == "__main__":
    main()
