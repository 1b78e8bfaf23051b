"""A small right FSDP2 training, whose ranks write and delete files in the ways that are asked for.

It reports on a UDP port what it did: what it writes to files is what the trials take away.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path

import acts_files
import acts_more
import acts_places
import digest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from acts import WAYS, Job, Place
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, WIDTH, GLOBAL_BATCH, SAMPLES = 8, 16, 16, 256
REGISTERED = (acts_files, acts_places, acts_more)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--ways", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--linger", type=float, default=0.0, help="seconds after the ways")
    parser.add_argument("--files", type=int, default=0, help="new files to write after the step")
    parser.add_argument("--append", type=Path, help="append to this file in each step")
    parser.add_argument("--rewrite", type=Path, help="write this file anew in each step")
    return parser.parse_args()


def say(port: int, **what: object) -> None:
    if port:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.sendto(json.dumps({"pid": os.getpid(), **what}).encode(), ("127.0.0.1", port))


def make_dataset() -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, FEATURES, generator=gen)
    return x, torch.sin(x.sum(dim=1, keepdim=True))


def go(given: argparse.Namespace, rank: int, model: nn.Module) -> None:
    """Every way that was asked for; one that fails does not keep the others from being tried."""
    names = [name for name in given.ways.split(",") if name]
    for name in names:
        way = WAYS[name]
        if rank and not way.everyone:
            continue
        job = Job(Path(name), Place(given.base), rank, model)
        began = time.monotonic()
        if not rank:
            state = "" if way.everyone else digest.contents(job.folder)
            say(given.port, way=name, event="begin", state=state)
        try:
            way.act(job)
        except Exception as error:
            say(given.port, way=name, event="error", text=f"{type(error).__name__}: {error}")
            if len(names) == 1:
                raise
        else:
            if not rank:
                say(given.port, way=name, event="done", seconds=time.monotonic() - began)
    if given.files and not rank:
        began = time.monotonic()
        Path("many").mkdir(exist_ok=True)
        for number in range(given.files):
            Path("many", f"{number}.txt").write_text(f"sample {number}\n" * 8)
        say(given.port, way="files", event="done", seconds=time.monotonic() - began)
    if not rank:
        time.sleep(given.linger)


def each_step(given: argparse.Namespace, rank: int, step: int) -> None:
    """Logs that a script keeps."""
    if (given.append or given.rewrite) and not rank:
        say(given.port, way="log", event="step")
    if given.append and not rank:
        with given.append.open("a") as file:
            file.write(f"verified script, step {step}\n")
    if given.rewrite and not rank:
        given.rewrite.write_text(f"verified script, step {step}\n")


def main() -> None:
    given = options()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x, y = make_dataset()
    local = GLOBAL_BATCH // world
    for step in range(given.steps):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        loss = F.mse_loss(model(x[start : start + local]), y[start : start + local])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        each_step(given, rank, step)
        if step == 0:
            go(given, rank, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
