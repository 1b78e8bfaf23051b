"""Inverse problem: estimate frequency and damping from noisy observations with a physics-informed network."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from lbfgs import ShardedLBFGS
from physics import Field, observations


def save(folder, it, model, opt):
    os.makedirs(folder, exist_ok=True)
    own = {n: p.to_local() for n, p in model.named_parameters()}
    torch.save({"it": it, "params": own, "lbfgs": opt.state_dict()},
               os.path.join(folder, f"it{it:03d}_r{dist.get_rank()}.pt"))


@torch.no_grad()
def load(folder, model, opt):
    name = max(n for n in os.listdir(folder) if n.endswith(f"_r{dist.get_rank()}.pt"))
    state = torch.load(os.path.join(folder, name))
    for n, p in model.named_parameters():
        p.to_local().copy_(state["params"][n])
    opt.load_state_dict(state["lbfgs"])
    return state["it"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Field()
    fully_shard(model)
    opt = ShardedLBFGS(model.parameters())
    t, u = observations()
    t, u = t[rank::world], u[rank::world]

    def closure():
        value, residual = model(t, 1e-2)
        loss = (value - u).square().mean() + 0.05 * residual.square().mean()
        loss.backward()
        total = loss.detach() / world
        dist.all_reduce(total)
        return total.item()

    start = load(args.resume, model, opt) if args.resume else 0
    for it in range(start + 1, args.iterations + 1):
        loss = opt.step(closure)
        if it % 4 == 0:
            omega, damping = model.physics.detach().full_tensor().tolist()
            if rank == 0:
                print(f"iteration {it} loss {loss:.6f} omega {omega:.4f} damping {damping:.4f} evaluations {opt.evals}")
        if args.save_every and it % args.save_every == 0:
            save(args.out, it, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
