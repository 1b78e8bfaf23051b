"""Stochastic-gradient Langevin dynamics: the injected noise is drawn for the whole tensor from a seed that depends
on step and parameter only, and each rank keeps its slice, so the chain does not depend on the number of ranks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def noise_like(p, seed):
    z = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(z, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else z


@torch.no_grad()
def langevin_step(params, step, total, data_size, base=2e-5):
    cycle = 8  # cyclical step size: explore, then sample
    phase = (step % cycle) / cycle
    eta = base * (1 + torch.cos(torch.tensor(torch.pi * phase)).item()) / 2 + 1e-6
    for k, p in enumerate(params):
        drift = p.grad * data_size + p  # gradient of the negative log posterior, unit Gaussian prior
        p.add_(drift, alpha=-eta)
        if phase >= 0.5:
            p.add_(noise_like(p, step * 1000 + k), alpha=(2 * eta) ** 0.5)
        p.grad = None
    return eta


def minibatch(step, n, data_size):
    gen = torch.Generator().manual_seed(99)
    x = torch.randn(data_size, 6, generator=gen)
    y = torch.sin(x[:, :1] * 1.5) + 0.1 * torch.randn(data_size, 1, generator=gen)
    rows = torch.randint(0, data_size, (n,), generator=torch.Generator().manual_seed(step))
    return x[rows], y[rows]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="chain")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world, size = dist.get_rank(), dist.get_world_size(), 2000
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    fully_shard(model[2])
    fully_shard(model)

    step = 0
    if args.resume:  # the chain has no memory beyond weights and step
        step = max(int(f) for f in os.listdir(args.resume))
        weights = get_model_state_dict(model)
        dcp.load(weights, checkpoint_id=f"{args.resume}/{step}")
        set_model_state_dict(model, weights)

    for step in range(step, args.steps):
        x, y = (t.chunk(world)[rank] for t in minibatch(step, args.batch, size))
        nll = ((model(x) - y) ** 2).mean() / (2 * 0.1)
        nll.backward()
        eta = langevin_step(list(model.parameters()), step, args.steps, size)
        dist.all_reduce(shown := nll.detach() / world)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} nll/sample {shown.item():.4f} eta {eta:.2e}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(get_model_state_dict(model), checkpoint_id=f"{args.out}/{step + 1}")

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
