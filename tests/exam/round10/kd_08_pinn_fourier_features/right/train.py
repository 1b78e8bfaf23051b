"""Physics-informed network for the heat equation on a rod. Every rank draws its own collocation points."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.fsdp import fully_shard

from pinn import HeatResidual, Net, exact


def seed_everything(seed):
    torch.manual_seed(seed)


def collocation(n):
    inner = torch.rand(n, 2)
    start = torch.stack([torch.rand(n // 2), torch.zeros(n // 2)], 1)
    wall = torch.stack([torch.randint(0, 2, (n // 2,)).float(), torch.rand(n // 2)], 1)
    return inner, start, wall


def build(args):
    problem = HeatResidual(Net())
    for lin in problem.net.hidden:
        fully_shard(lin)
    fully_shard(problem.net)
    fully_shard(problem)
    opt = torch.optim.Adam(problem.parameters(), lr=4e-3, eps=1e-6)
    return problem, opt


@torch.no_grad()
def relative_error(net):
    side = torch.linspace(0, 1, 15)
    grid = torch.cartesian_prod(side, side)
    u, ref = net(grid).squeeze(-1), exact(grid)
    return ((u - ref).norm() / ref.norm()).item()


def snapshot(problem, opt):
    m, o = get_state_dict(problem, opt)
    return {"model": m, "opt": o}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--points", type=int, default=64, help="per rank")
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    seed_everything(args.seed)
    problem, opt = build(args)
    seed_everything(args.seed + 1 + rank)

    first = 0
    if args.resume:
        first = max(int(d) for d in os.listdir(args.resume) if d.isdigit())
        folder = os.path.join(args.resume, str(first))
        state = snapshot(problem, opt)
        dcp.load(state, checkpoint_id=os.path.join(folder, "state"))
        set_state_dict(problem, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        torch.set_rng_state(torch.load(os.path.join(folder, f"rng{rank}.pt")))

    for step in range(first, args.steps):
        loss = problem(*collocation(args.points))
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 8 == 0:
            print(f"step {step + 1} loss {mean.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            folder = os.path.join(args.out, str(step + 1))
            dcp.save(snapshot(problem, opt), checkpoint_id=os.path.join(folder, "state"))
            torch.save(torch.get_rng_state(), os.path.join(folder, f"rng{rank}.pt"))
            dist.barrier()

    err = relative_error(problem.net)
    full = get_model_state_dict(problem, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"relative error of the solution {err:.4f}", flush=True)
        if args.export:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
