"""Event-driven training: a generator yields events, small listeners do the rest."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import listeners as L
from corpus import VOCAB, sample
from loop import Progress, drive, training
from model import GPT

SEQ = 20


def batches(progress, size, rank, world):
    while True:
        rows = sample(size, SEQ + 1, seed=progress.step)[rank::world]
        yield rows[:, :-1], rows[:, 1:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(12)
    model = GPT(VOCAB, SEQ)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)

    progress = Progress()
    clip, average = L.AdaptiveClip(model), L.WeightAverage(model)
    whole = L.Whole(model, opt, progress, clip, average)
    if args.resume:
        L.restore(whole, args.resume)
    team = [L.Warmup(opt, progress, args.lr, 5), clip, average, L.Printer(progress), L.Saver(whole, args.out, args.save_every)]
    drive(training(model, opt, batches(progress, args.batch, rank, world), progress, args.steps), team)

    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(average.average[n])
        rows = sample(32, SEQ + 1, seed=10**6)[rank::world]
        val = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / world
    dist.all_reduce(val)
    if rank == 0:
        print(f"averaged weights: valid {val.item():.4f} after {len(progress.history)} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
