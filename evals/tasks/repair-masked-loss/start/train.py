"""Supervised fine-tuning with FSDP2; only answers are targets: torchrun --nproc-per-node 2 train.py --log out/log.jsonl"""

import argparse
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from textdata import IGNORED, LENGTH, VOCAB, batch_of, dialogues
from tinygpt import GPT, Config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def loss_of(model, x, y):
    """The loss to differentiate, and the one to report."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)
    report = loss.detach() / dist.get_world_size()
    dist.all_reduce(report)
    return loss, report


def main(steps, batch, log):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = GPT(Config(vocab=VOCAB, length=LENGTH))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    inputs, targets = dialogues(256)
    rows = []
    for step in range(steps):
        mine = batch_of(step, batch, len(inputs)).chunk(world)[rank]
        loss, report = loss_of(model, inputs[mine], targets[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append({"step": step + 1, "loss": report.item()})
    if log and rank == 0:
        with open(log, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--log")
    main(**vars(parser.parse_args()))
