"""LoRA fine-tuning of a frozen, sharded base model."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import checkpoint
from data import VOCAB, batches
from lora import add_adapters, trainable
from model import pretrained


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-2)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="runs/lora")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="", help="write the adapters as one ordinary file")
    return p.parse_args()


def build(mesh):
    model = pretrained()
    add_adapters(model, {"q_proj", "v_proj", "gate_proj", "down_proj", "lm_head"})
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(init_device_mesh("cpu", (world,)))
    params = list(trainable(model).values())
    if rank == 0:
        print(f"{sum(p.numel() for p in params)} trainable of {sum(p.numel() for p in model.parameters())}")
    optimizer = torch.optim.AdamW(params, lr=args.lr, weight_decay=0.0)
    step = checkpoint.load_newest(args.resume, model, optimizer) if args.resume else 0

    for ids in batches(step, args.batch, rank, world):
        if step == args.steps:
            break
        loss = F.cross_entropy(model(ids[:, :-1]).reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"[{step:3d}] loss={shown.item():.4f}")
        if args.save_every and step % args.save_every == 0:
            checkpoint.save(args.out, step, model, optimizer)

    if args.export:
        full = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in trainable(model).items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
