"""Sharpness-aware minimisation: the optimizer calls a closure twice per step and moves the shards in between."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class SAM:
    """Wraps a base optimizer; `step(closure)` does ascent, second gradient, descent."""

    def __init__(self, base, rho=0.05):
        self.base, self.rho = base, rho
        self.params = [p for g in base.param_groups for p in g["params"]]

    def _norm(self):
        sq = torch.stack([p.grad.to_local().square().sum() for p in self.params]).sum()
        dist.all_reduce(sq)
        return sq.sqrt()

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        scale = self.rho / (self._norm() + 1e-12)
        home = [p.to_local().clone() for p in self.params]
        for p in self.params:
            p.to_local().add_(p.grad.to_local() * scale)
        with torch.enable_grad():
            closure()
        for p, h in zip(self.params, home):
            p.to_local().copy_(h)
        self.base.step()
        return loss


def two_spirals(n=512):
    g = torch.Generator().manual_seed(0)
    t = torch.rand(n, generator=g) * 6 + 0.5
    y = torch.arange(n) % 2
    a = t + y * 3.14159
    x = torch.stack((t * a.cos(), t * a.sin()), 1) / 3 + 0.05 * torch.randn(n, 2, generator=g)
    return torch.cat((x, x.square(), torch.sin(3 * x)), 1), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    fully_shard(model[2])
    fully_shard(model, reshard_after_forward=True)
    sam = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def snapshot():
        # SGD has one buffer per parameter; before the first step there are none, so make them here
        names = [n for n, _ in model.named_parameters()]
        momenta = {}
        for n, p in zip(names, sam.params):
            state = sam.base.state[p]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)
            momenta[n] = state["momentum_buffer"]
        return {"weights": get_model_state_dict(model), "momenta": momenta}

    start = 0
    if args.resume:
        newest = max((int(p.name) for p in Path(args.resume).iterdir()))
        dcp.load(snapshot(), checkpoint_id=f"{args.resume}/{newest}")  # loads in place, into the live shards
        start = newest

    X, Y = two_spirals()
    for step in range(start, args.steps):
        ids = torch.randperm(len(X), generator=torch.Generator().manual_seed(step))[:128][rank::world]

        def closure():
            model.zero_grad()
            loss = F.cross_entropy(model(X[ids]), Y[ids])
            loss.backward()
            return loss.detach()

        loss = sam.step(closure)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(), checkpoint_id=f"{args.out}/{step + 1}")
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.4f}", flush=True)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
