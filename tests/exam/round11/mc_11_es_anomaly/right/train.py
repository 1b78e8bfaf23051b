"""Train an anomaly detector by evolution on a soft F1 score over the global batch."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from detector import Detector, windows
from evolution import EvolutionStrategy


def soft_f1_loss(score, label):
    """1 - F1 of the whole batch: a ratio of sums, so the sums are reduced and not the ratios."""
    score = score.squeeze(-1).double()
    sums = torch.stack([(score * label).sum(), score.sum(), label.sum().double()])
    dist.all_reduce(sums)
    return (1 - 2 * sums[0] / (sums[1] + sums[2])).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--generations", type=int, default=14)
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Detector()
    # the weights change between forwards without a backward, so nothing may stay gathered
    fully_shard(model, reshard_after_forward=True)
    es = EvolutionStrategy(model, pairs=6, sigma=0.1, lr=0.25, momentum=0.5, seed=77)
    x, label = windows()

    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        state = torch.load(os.path.join(args.resume, newest, f"shard{rank}.pt"))
        with torch.no_grad():
            for p, w in zip(model.parameters(), state["weights"]):
                p.to_local().copy_(w)
        es.load_state_dict(state["es"])

    while es.generation < args.generations:
        g = torch.Generator().manual_seed(500 + es.generation)
        rows = torch.randperm(len(x), generator=g)[:args.batch][rank::world]
        mean = es.generation_step(lambda: soft_f1_loss(model(x[rows]), label[rows]))
        if rank == 0 and es.generation % 2 == 0:
            print(f"generation {es.generation} mean loss {mean:.6f} smoothed {es.baseline:.6f}")
        if args.save_every and es.generation % args.save_every == 0:
            folder = os.path.join(args.out, f"gen{es.generation:05d}")
            os.makedirs(folder, exist_ok=True)
            torch.save({"weights": [p.detach().to_local() for p in model.parameters()], "es": es.state_dict()},
                       os.path.join(folder, f"shard{rank}.pt"))

    with torch.no_grad():
        final = soft_f1_loss(model(x[rank::world]), label[rank::world])
    if rank == 0:
        print(f"soft F1 on all windows {1 - final:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
