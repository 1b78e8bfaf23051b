"""Full batch fit of a beam deflection surrogate in double precision."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from flat import FlatParameters
from lbfgs import LBFGS


def beam_designs(n=96, seed=70):
    g = torch.Generator().manual_seed(seed)
    length, load, stiff = (0.5 + torch.rand(n, 3, generator=g)).unbind(1)
    return torch.stack([length, load, stiff], 1), (load * length ** 3 / (3 * stiff))[:, None]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=20)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--resume", type=Path)
    args = ap.parse_args()
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 18), nn.Tanh(), nn.Linear(18, 18), nn.Tanh(), nn.Linear(18, 1))
    fully_shard([model[0], model[2]], reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    flat = FlatParameters(model)
    x, y = (t.chunk(world)[rank] for t in beam_designs())

    def mean_over_ranks(value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return (value / world).item()

    def value_and_gradient():
        loss = (model(x) - y).square().mean()
        loss.backward()
        return mean_over_ranks(loss), flat.gradient()

    @torch.no_grad()
    def value():
        return mean_over_ranks((model(x) - y).square().mean())

    solver, start = LBFGS(flat, value_and_gradient, value), 0
    if args.resume:
        saved = torch.load(args.resume / f"piece{rank}.pt", weights_only=False)
        assert saved["world"] == world, "the pieces of another number of ranks"
        flat.assign(saved["flat"])
        solver.load_state_dict(saved["solver"])
        start = saved["iteration"]
    for k in range(start + 1, args.iterations + 1):
        loss, t = solver.step()
        if rank == 0 and k % 4 == 0:
            print(f"iteration {k} loss {loss:.8f} step length {t:.3g}", flush=True)
        if args.save_every and k % args.save_every == 0 and k < args.iterations:
            args.out.mkdir(parents=True, exist_ok=True)
            torch.save({"flat": flat.values(), "solver": solver.state_dict(), "iteration": k, "world": world},
                       args.out / f"piece{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
