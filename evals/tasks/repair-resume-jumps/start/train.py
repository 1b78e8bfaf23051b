"""FSDP2 training with distributed checkpoints: torchrun --nproc-per-node 2 train.py --out out [--resume out/step_3]"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from textdata import LENGTH, VOCAB, batch_of, sequences
from tinygpt import GPT, Config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build():
    torch.manual_seed(0)
    model = GPT(Config(vocab=VOCAB, length=LENGTH))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / 12)))
    return model, optimizer, schedule


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(folder, model, optimizer):
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)


def load(folder, model, optimizer):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6, help="the step to stop at")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer, schedule = build()
    first = 0
    if args.resume:
        load(args.resume, model, optimizer)
        first = int(args.resume.rpartition("_")[2])
    inputs, targets = sequences(256)
    for step in range(first, args.steps):
        mine = batch_of(step, args.batch, len(inputs)).chunk(world)[rank]
        loss = F.cross_entropy(model(inputs[mine]).flatten(0, 1), targets[mine].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f} lr {optimizer.param_groups[0]['lr']:.2e}", flush=True)
        if args.out and (step + 1) % args.save_every == 0:
            save(f"{args.out}/step_{step + 1}", model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
