"""Physics-informed network for -u'' = f on [0, 1] with u(0) = u(1) = 0.

The derivatives with respect to x are carried through the layers by hand (value, first, second
derivative), so that no double backward is needed. The optimizer evaluates the loss at several step
sizes along a momentum direction and keeps the best one."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)


class JetLinear(nn.Linear):
    def forward(self, jet):
        v, d1, d2 = jet
        return super().forward(v), d1 @ self.weight.T, d2 @ self.weight.T


class JetTanh(nn.Module):
    def forward(self, jet):
        v, d1, d2 = jet
        t = torch.tanh(v)
        s = 1 - t * t
        return t, s * d1, s * d2 - 2 * t * s * d1 * d1


class Solution(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(
            JetLinear(1, width), JetTanh(), JetLinear(width, width), JetTanh(), JetLinear(width, 1)
        )

    def forward(self, x):
        return self.net((x, torch.ones_like(x), torch.zeros_like(x)))


def forcing(x):
    return math.pi**2 * torch.sin(math.pi * x) + 0.5 * (3 * math.pi) ** 2 * torch.sin(3 * math.pi * x)


def exact(x):
    return torch.sin(math.pi * x) + 0.5 * torch.sin(3 * math.pi * x)


class CandidateDescent(torch.optim.Optimizer):
    """theta <- theta - eta * direction, eta chosen among a few; the closure returns the GLOBAL loss."""

    def __init__(self, params, etas=(3e-4, 1e-3, 3e-3, 1e-2), betas=(0.8, 0.98)):
        super().__init__(params, dict(etas=etas, betas=betas))
        self.count = 0

    @torch.no_grad()
    def step(self, closure):
        group = self.param_groups[0]
        b1, b2 = group["betas"]
        with torch.enable_grad():
            loss = closure(backward=True)
        self.count += 1
        shards, dirs, origin = [], [], []
        for p in group["params"]:
            w, g = p.to_local(), p.grad.to_local()
            st = self.state[p]
            if not st:
                st["m"], st["v"] = torch.zeros_like(w), torch.zeros_like(w)
            st["m"].lerp_(g, 1 - b1)
            st["v"].lerp_(g * g, 1 - b2)
            m, v = st["m"] / (1 - b1**self.count), st["v"] / (1 - b2**self.count)
            shards.append(w)
            origin.append(w.clone())
            dirs.append(m / (v.sqrt() + 1e-8))

        values = []
        for eta in group["etas"]:
            for w, o, d in zip(shards, origin, dirs):
                w.copy_(o - eta * d)
            values.append(closure(backward=False))
        best = min(range(len(values)), key=values.__getitem__)
        for w, o, d in zip(shards, origin, dirs):
            w.copy_(o - group["etas"][best] * d)
        return loss, values[best], group["etas"][best]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--points", type=int, default=64)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = Solution()
    fully_shard(model, reshard_after_forward=True)
    optim = CandidateDescent(model.parameters())

    def residual(x):
        _, _, d2 = model(x)
        edge, _, _ = model(torch.tensor([[0.0], [1.0]]))
        return (d2 + forcing(x)).square().mean() + 200 * edge.square().mean()

    g = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        x = torch.rand(args.points, 1, generator=g).view(world, -1, 1)[rank]

        def closure(backward):
            with torch.set_grad_enabled(backward):
                loss = residual(x)
            if backward:
                optim.zero_grad()
                loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            return total.item() / world

        before, _, _ = optim.step(closure)
        if rank == 0:
            print(f"step {step:3d}  loss {before:10.4f}", flush=True)

    with torch.no_grad():
        grid = torch.linspace(0, 1, 50).unsqueeze(1)
        err = (model(grid)[0] - exact(grid)).abs().mean().item()
    if rank == 0:
        print(f"mean error against the exact solution {err:.4f}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
