"""FSDP2 with gradient accumulation: torchrun --nproc-per-node 2 train.py --pieces 4"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from textdata import LENGTH, VOCAB, batch_of, sequences
from tinygpt import GPT, Config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(world):
    model = GPT(Config(vocab=VOCAB, length=LENGTH))
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def accumulate(model, inputs, targets, pieces):
    """Gradients of the mean loss over `pieces` micro-batches; only the last one is reduced."""
    for number, (x, y) in enumerate(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)):
        model.set_requires_gradient_sync(number % pieces == 0)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        (loss / pieces).backward()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pieces", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    model = build(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    inputs, targets = sequences(256)
    for step in range(args.steps):
        mine = batch_of(step, args.batch, len(inputs)).chunk(world)[rank]
        accumulate(model, inputs[mine], targets[mine], args.pieces)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
