import argparse
import glob
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from earth import Slowness, survey, true_slowness
from lbfgs import LBFGS


def iterations(model, opt, rays, first, last):
    """Runs the inversion, yielding after every L-BFGS iteration."""
    points, length, times, n_total = rays

    def misfit():
        """This rank's part of the mean squared travel-time residual over all rays."""
        predicted = model(points.flatten(0, 1)).view(points.shape[:2]).mean(1) * length
        return (predicted - times).square().sum() / n_total * 100

    def value():
        with torch.no_grad():
            total = misfit()
        dist.all_reduce(total)
        return total.item()

    def value_and_grad():
        part = misfit()
        # parts add up, FSDP averages
        (part * dist.get_world_size()).backward()
        total = part.detach().clone()
        dist.all_reduce(total)
        return total.item()

    for k in range(first, last):
        loss, t = opt.step(value, value_and_grad)
        yield k + 1, loss, t


def model_error(model):
    side = (torch.arange(12) + 0.5) / 12
    grid = torch.cartesian_prod(side, side)
    with torch.no_grad():
        return (model(grid).squeeze(-1) - true_slowness(grid)).abs().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=25)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    points, length, times = survey()
    part = torch.arange(len(times)).tensor_split(world)[rank]
    model = Slowness()
    for b in model.blocks:
        fully_shard(b)
    # the line search moves the weights between forwards without a backward, so nothing may stay gathered
    fully_shard(model, reshard_after_forward=True)
    opt = LBFGS(model.parameters())

    first = 0
    if args.resume:
        first = max(int(os.path.basename(f).split("_")[1]) for f in glob.glob(f"{args.resume}/it_*_rank{rank}.pt"))
        state = torch.load(f"{args.resume}/it_{first}_rank{rank}.pt", weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["lbfgs"])

    rays = points[part], length[part], times[part], len(times)
    for k, loss, t in iterations(model, opt, rays, first, args.iterations):
        if k % 5 == 0:
            err = model_error(model)
            if rank == 0:
                print(f"iteration {k} misfit {loss:.6f} step length {t} evaluations {opt.evaluations} model error {err:.4f}", flush=True)
        if args.save_every and k % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "lbfgs": opt.state_dict()}, f"{args.out}/it_{k}_rank{rank}.pt")
            dist.barrier()

    weights = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}
    if args.export and rank == 0:
        torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
