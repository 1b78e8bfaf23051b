import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import checkpoint
from lion import Lion
from protein import ProteinLM, families, mask_batch


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=22)
    ap.add_argument("--global-batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume", help="continue from the newest checkpoint below this folder (same number of ranks)")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    seqs = families()
    model = ProteinLM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = Lion(model.named_parameters(), lr=6e-3, weight_decay=0.05)
    step = checkpoint.load(args.resume, model, opt) if args.resume else 0

    while step < args.steps:
        x, where, target = (t.tensor_split(world)[rank] for t in mask_batch(seqs, step, args.global_batch))
        loss = F.cross_entropy(model(x, where), target.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step(lr_scale=min(1.0, (step + 1) / 4) * (0.5 + 0.5 * math.cos(math.pi * step / args.steps)))
        step += 1
        value = loss.detach().clone()
        dist.all_reduce(value)
        if rank == 0 and (step % 4 == 1 or step == args.steps):
            print(f"step {step} masked-residue loss {value.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            checkpoint.save(args.out, step, model, opt)

    weights = {}
    for n, p in model.named_parameters():
        weights[n] = (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
    if args.export and rank == 0:
        torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
