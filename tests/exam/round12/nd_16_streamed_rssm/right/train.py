"""Truncated backpropagation through an endless stream: the memory of a chunk is the start of the next one."""
import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import store
from rssm import LatentDynamics
from stream import Stream


@dataclass
class Options:
    chunks: int = 50
    chunk_size: int = 6
    lr: float = 1e-2
    save_every: int = 0
    out: str = ""
    resume: str = ""


def options():
    ap = argparse.ArgumentParser()
    for name, field in Options.__dataclass_fields__.items():
        ap.add_argument("--" + name.replace("_", "-"), type=field.type, default=field.default)
    return Options(**vars(ap.parse_args()))


def main(o):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stream = Stream()
    torch.manual_seed(0)
    model = LatentDynamics()
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=o.lr, eps=1e-5)
    memory, start = torch.zeros(stream.envs // world, model.hidden), 0
    if o.resume:
        start, memory = store.read(o.resume, model, opt)

    for i in range(start, o.chunks):
        obs, act, first = (t.chunk(world, 1)[rank] for t in stream.chunk(i, o.chunk_size))
        scored = (~first).sum().float() * obs.shape[-1]
        dist.all_reduce(scored)
        total, memory = model(memory, obs, act, first)
        # gradients are averaged over the ranks, the loss is a mean over the entries of all ranks
        (total * world / scored).backward()
        memory = memory.detach()
        opt.step()
        opt.zero_grad()
        shown = total.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and i % 7 == 0:
            print(f"chunk {i:3d}  loss {shown.item() / scored.item():.5f}", flush=True)
        if o.save_every and (i + 1) % o.save_every == 0 and i + 1 < o.chunks:
            store.write(o.out, i + 1, model, opt, memory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(options())
