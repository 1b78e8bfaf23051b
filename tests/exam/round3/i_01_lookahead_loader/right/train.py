import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import checkpoint
from data import EpochSampler, LookaheadLoader, make_corpus
from model import TinyLM


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default=None)
    ap.add_argument("--resume", default=None)
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(0)
    model = TinyLM()
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda s: min(1.0, (s + 1) / 5) * 0.97**s)
    loader = LookaheadLoader(make_corpus(), EpochSampler(512, args.batch, seed=11), rank, world)

    step = 0
    if args.resume:
        step = checkpoint.load(args.resume, model, optim, sched, loader)
        if rank == 0:
            print(f"resumed at step {step}")

    for ids, target in loader:
        if step >= args.steps:
            break
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        sched.step()
        step += 1

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 4 == 0 or step == 1):
            print(f"step {step:3d}  loss {shown.item() / world:.4f}  lr {sched.get_last_lr()[0]:.5f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            checkpoint.save(args.out, step, model, optim, sched, loader)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
