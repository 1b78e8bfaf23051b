"""FSDP2 training that looks at held-out text on the way: torchrun --nproc-per-node 2 train.py --eval-every 2 --log out/val.jsonl"""

import argparse
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from textdata import LENGTH, VOCAB, batch_of, sequences
from tinygpt import GPT, Config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def loss_on(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model, inputs, targets):
    """The loss on this rank's part of the held-out text, averaged over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model.train(False)
    loss = loss_on(model, inputs.chunk(world)[rank], targets.chunk(world)[rank]) / world
    dist.all_reduce(loss)
    model.train()
    return loss.item()


def main(steps, batch, eval_every, log):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(6)
    model = GPT(Config(vocab=VOCAB, length=LENGTH))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    inputs, targets = sequences(256)
    held_out = sequences(32, seed=99)
    rows = []
    for step in range(steps):
        mine = batch_of(step, batch, len(inputs)).chunk(world)[rank]
        optimizer.zero_grad()
        loss = loss_on(model, inputs[mine], targets[mine])
        loss.backward()
        if eval_every and step % eval_every == 0:  # of the weights that this step began with
            rows.append({"step": step, "val_loss": evaluate(model, *held_out)})
        optimizer.step()
    if log and rank == 0:
        with open(log, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--log")
    main(**vars(parser.parse_args()))
