"""Full-batch regression with a closure-based L-BFGS (double precision)."""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from lbfgs import ShardedLBFGS
from problem import Surrogate, ragged_part, simulator

torch.set_default_dtype(torch.float64)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=25)
    ap.add_argument("--ridge", type=float, default=1e-5)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = simulator()
    total = len(x)
    part = ragged_part(total, rank, world)
    x, y = x[part], y[part]

    torch.manual_seed(0)
    model = Surrogate()
    fully_shard(model.two)
    fully_shard(model)
    optim = ShardedLBFGS(model.parameters())
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optim.zero_grad()
        # the gradients are averaged over the ranks, hence the factor
        fit = (model(x) - y).square().sum() * world / total
        fit.backward()
        value = fit.detach() / world
        decay = torch.zeros_like(value)
        with torch.no_grad():
            for p in model.parameters():
                p.grad.add_(p, alpha=2 * args.ridge)
                decay += args.ridge * p.to_local().square().sum()
        value = value + decay
        dist.all_reduce(value)
        return value.item()

    for step in range(args.steps):
        loss, t = optim.step(closure)
        if rank == 0:
            print(f"iteration {step:3d}  loss {loss:.6f}  step {t:.4f}  evaluations {calls}", flush=True)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
