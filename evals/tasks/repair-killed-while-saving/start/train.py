"""FSDP2 training on machines that may vanish: torchrun --nproc-per-node 2 train.py --out out [--resume out]"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from textdata import LENGTH, VOCAB, batch_of, sequences
from tinygpt import GPT, Config
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def save(out, model, optimizer, step):
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=out / "checkpoint")


def resume(out, model, optimizer):
    """Load the newest checkpoint below `out`; returns its step."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=out / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = GPT(Config(vocab=VOCAB, length=LENGTH))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = resume(args.resume, model, optimizer) if args.resume else 0
    inputs, targets = sequences(256)
    while step < args.steps:
        mine = batch_of(step, args.batch, len(inputs)).chunk(world)[rank]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[mine]).flatten(0, 1), targets[mine].flatten()).backward()
        optimizer.step()
        step += 1
        if args.out and step % args.save_every == 0:
            save(args.out, model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
