"""Pre-training of a small GPT on a tokenised corpus, one file per batch lane."""
import argparse
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import checkpoint
from data import VOCAB, LaneReader, write_corpus
from model import GPT


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--seq-len", type=int, default=32)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--warmup", type=int, default=4)
    p.add_argument("--corpus", default=None)
    p.add_argument("--out", default=None)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", default=None)
    return p.parse_args()


def lr_at(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    frac = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * frac)))


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    folder = [args.corpus or (tempfile.mkdtemp(prefix="corpus_") if rank == 0 else None)]
    dist.broadcast_object_list(folder, src=0)
    if rank == 0 and not args.corpus:
        write_corpus(folder[0])
    dist.barrier()
    reader = LaneReader(folder[0], args.seq_len, rank, world)

    torch.manual_seed(7)
    model = GPT(VOCAB, args.seq_len)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)

    start = checkpoint.load(args.resume, model, opt, reader) if args.resume else 0

    for step in range(start, args.steps):
        for g in opt.param_groups:
            g["lr"] = lr_at(step, args)
        x, y = reader.next_batch()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 3 == 2 or step == args.steps - 1):
            print(f"step {step + 1:3d} loss {shown.item() / world:.4f} |g| {norm.full_tensor().item():.3f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            checkpoint.save(args.out, step + 1, model, opt, reader)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
