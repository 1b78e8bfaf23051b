"""Learn to add: torchrun --standalone --nproc-per-node 2 run.py preset=tiny fit.updates=50"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from conf import Settings, flat, settings
from fit import optimizers, set_rates, update_once
from keep import read, write
from nets import Mind
from split import lay, rest
from stream import collate, cut, share, vocabulary
from torch.distributed.device_mesh import init_device_mesh

HELD_OUT = 10_000_000


def say(**what: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


@torch.no_grad()
def probe(model: Mind, made: Settings, device: torch.device) -> float:
    """Share of right answers on samples that are never trained on; each rank asks its own."""
    indices = share(0, 32, dist.get_rank(), dist.get_world_size())
    tokens, answers = collate(made.task, range(HELD_OUT + indices.start, HELD_OUT + indices.stop))
    right = (model.guess(tokens.to(device), answers.shape[1]) == answers.to(device)).float().mean()
    rest(model)
    dist.all_reduce(right)
    return right.item() / dist.get_world_size()


def learn(made: Settings, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("fsdp",))
    torch.manual_seed(made.fit.seed)
    model = lay(Mind(made.net, vocabulary(made.task)).to(device), mesh, made.shard)
    kinds = optimizers(model, made.fit)
    progress = {"update": 0, "samples": 0, "best": 0.0}
    if made.io.resume:
        progress = read(made.io.dir, model, kinds)
    say(parameters=sum(p.numel() for p in model.parameters()), ranks=world, start=progress, **flat(made))

    while progress["update"] < made.fit.updates:
        set_rates(kinds, progress["update"], made.fit)
        mine = share(progress["update"], made.batch.size, rank, world)
        batches = (collate(made.task, piece) for piece in cut(mine, made.batch.micro))
        seen = update_once(model, kinds, [(t.to(device), a.to(device)) for t, a in batches], made.fit)
        progress["update"] += 1
        progress["samples"] += made.batch.size
        if progress["update"] % made.io.probe_every == 0:
            seen["right"] = probe(model, made, device)
            progress["best"] = max(progress["best"], seen["right"])
        say(update=progress["update"], **{key: round(value, 6) for key, value in seen.items()})
        if progress["update"] % made.io.save_every == 0:
            write(made.io.dir, model, kinds, progress)


def main() -> None:
    made = settings(sys.argv[1:])
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    learn(made, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
