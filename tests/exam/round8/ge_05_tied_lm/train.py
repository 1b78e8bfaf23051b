"""Tiny GPT with tied embeddings, trained with FSDP2 on a copy-and-shift language."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from gpt import materialize

VOCAB, CONTEXT, BATCH = 64, 16, 16


def batches(rank, world, first_step):
    """Sequences in which every token follows from the one before by a fixed random map, with noise."""
    follow = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(40))
    step = first_step
    while True:
        g = torch.Generator().manual_seed(41000 + step)
        ids = torch.randint(VOCAB, (BATCH, CONTEXT + 1), generator=g)
        keep = torch.rand(BATCH, CONTEXT + 1, generator=g) < 0.8
        for t in range(1, CONTEXT + 1):
            ids[:, t] = torch.where(keep[:, t], follow[ids[:, t - 1]], ids[:, t])
        n = BATCH // world
        ids = ids[rank * n:(rank + 1) * n]
        yield ids[:, :-1], ids[:, 1:]
        step += 1


def optimizer_groups(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--ckpt-every", type=int, default=0)
    parser.add_argument("--ckpt", type=pathlib.Path)
    parser.add_argument("--resume", type=pathlib.Path)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = materialize(seed=6, vocab=VOCAB, context=CONTEXT)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(optimizer_groups(model), lr=args.lr, betas=(0.9, 0.95), eps=1e-6)

    step = 0
    if args.resume:
        newest = max(args.resume.iterdir(), key=lambda p: int(p.name))
        weights, optim = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": optim}, checkpoint_id=newest)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)
        step = int(newest.name)

    for x, y in batches(rank, world, step):
        if step >= args.steps:
            break
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        dist.all_reduce(loss.detach())
        if rank == 0 and step % 8 == 0:
            print(f"step {step:3d} loss {loss.item() / world:.5f}", flush=True)
        if args.ckpt_every and step % args.ckpt_every == 0:
            weights, optim = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optim": optim}, checkpoint_id=args.ckpt / f"{step}")

    with torch.no_grad():
        x, y = next(batches(0, 1, 100_000))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    if rank == 0:
        print(f"held-out loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
