"""Neural ODE for predator and prey numbers (Lotka-Volterra). The horizon grows in stages during training."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from adjoint import odeint, rk4


class Field(nn.Module):
    """Known exponential growth/decay plus a learnt interaction, for log populations."""

    def __init__(self, width=24):
        super().__init__()
        self.growth = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, z):
        return self.growth + self.net(z)


class NeuralODE(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = Field()

    def forward(self, z0, n_obs, dt=0.1, sub=3):
        # read the parameters here: within forward these are the gathered ones
        return odeint(self.field, tuple(self.field.parameters()), z0, n_obs, dt, sub)


def trajectories(n=96, n_obs=10, seed=19):
    g = torch.Generator().manual_seed(seed)
    z = torch.rand(n, 2, generator=g) * 1.2 - 0.6

    def true(z):
        x, y = z.exp().unbind(-1)
        return torch.stack([1.1 - 1.0 * y, -0.9 + 0.8 * x], -1)

    z0, obs = z, []
    for _ in range(n_obs):
        for _ in range(3):
            z = rk4(true, z, 0.1)
        obs.append(z)
    obs = torch.stack(obs, 1)
    return z0, obs + 0.01 * torch.randn(obs.shape, generator=g)


class Adagrad:
    """Adagrad with a decaying accumulator that is reset at the start of each stage (works on DTensors)."""

    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr
        self.acc = [torch.full_like(p.data, 1e-3) for p in self.params]

    @torch.no_grad()
    def step(self):
        for p, a in zip(self.params, self.acc):
            a.mul_(0.98).addcmul_(p.grad, p.grad)
            p.addcdiv_(p.grad, a.sqrt(), value=-self.lr)
            p.grad = None

    def reset(self):
        for a in self.acc:
            a.fill_(1e-3)


STAGES = [(3, 8), (6, 8), (10, 8)]          # observations fitted, optimizer steps


def schedule():
    """(stage, first step of the stage?, observations) for every optimizer step."""
    for s, (n_obs, steps) in enumerate(STAGES):
        for i in range(steps):
            yield s, i == 0, n_obs


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    z0, obs = trajectories()
    model = NeuralODE()
    fully_shard(model)
    opt = Adagrad(model.parameters(), lr=0.03)

    done = 0
    if args.resume:
        done = max(int(f.split(".")[0][1:]) for f in os.listdir(args.resume) if f.endswith(f".rank{rank}.pt"))
        s = torch.load(os.path.join(args.resume, f"n{done}.rank{rank}.pt"), weights_only=False)
        model.load_state_dict(s["model"])
        for a, saved in zip(opt.acc, s["acc"]):
            a.copy_(saved)

    for step, (stage, fresh, n_obs) in enumerate(schedule()):
        if step < done:
            continue
        if fresh:
            opt.reset()
        g = torch.Generator().manual_seed(step)
        ids = torch.randperm(len(z0), generator=g)[:24].chunk(world)[rank]
        loss = (model(z0[ids], n_obs) - obs[ids, :n_obs]).square().mean()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} stage {stage} horizon {n_obs} loss {shown.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "acc": opt.acc}, os.path.join(args.out, f"n{step + 1}.rank{rank}.pt"))
            dist.barrier()

    weights = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}
    if rank == 0 and args.export:
        torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
