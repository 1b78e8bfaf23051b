"""Sharpness-aware Lion with look-ahead, as an Optimizer with a closure; weights are shrunk and perturbed now and then.
All of its memory (momentum, slow weights, counters) lies in optimizer.state, so the usual state dict carries it."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class SharpLion(torch.optim.Optimizer):
    def __init__(self, params, lr, rho=0.05, betas=(0.9, 0.97), pull=0.5, every=5, temperature=0.05):
        super().__init__(params, dict(lr=lr, rho=rho, betas=betas, pull=pull, every=every, temperature=temperature))

    def _each(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            first = closure()
        # a DTensor sum: full_tensor adds the shards of all ranks
        norm = sum(p.grad.pow(2).sum() for _, p in self._each()).full_tensor().sqrt()
        moved = []
        for group, p in self._each():
            e = p.grad * (group["rho"] / (norm + 1e-12)).item()
            p.add_(e)
            moved.append((p, e))
        with torch.enable_grad():
            closure()
        for p, e in moved:
            p.sub_(e)
        for group, p in self._each():
            s = self.state[p]
            if not s:
                s["step"] = torch.zeros(())
                s["m"] = torch.zeros_like(p)
                s["slow"] = p.detach().clone()
            b1, b2 = group["betas"]
            # tanh is the soft form of Lion's sign
            p.sub_(torch.tanh((s["m"] * b1 + p.grad * (1 - b1)) / group["temperature"]) * group["lr"])
            s["m"].mul_(b2).add_(p.grad, alpha=1 - b2)
            s["step"] += 1
            if int(s["step"]) % group["every"] == 0:
                s["slow"].lerp_(p, group["pull"])
                p.copy_(s["slow"])
        return first


@torch.no_grad()
def shrink_and_perturb(net, step, keep, sigma):
    """Noise for the whole tensor, the same on all ranks; each takes the rows that it owns."""
    for n, p in enumerate(net.parameters()):
        g = torch.Generator().manual_seed(step * 1000 + n)
        noise = torch.randn(p.shape, generator=g)
        shards = list(noise.chunk(dist.get_world_size(), dim=0))
        local = p.to_local()
        own = shards[dist.get_rank()] if dist.get_rank() < len(shards) else noise[:0]
        local.mul_(keep).add_(own, alpha=sigma)


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(7, width), nn.GELU(), nn.Linear(width, width))
        self.b = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.c = nn.Linear(width, 2)

    def forward(self, x):
        x = self.a(x)
        return self.c(x + self.b(x))


def rows():
    g = torch.Generator().manual_seed(160)
    x = torch.randn(500, 7, generator=g)
    return x, torch.stack([x[:, 0] * x[:, 1], torch.sin(2 * x[:, 2]) + x[:, 3]], 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--perturb-every", type=int, default=12)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(16)
    net = Net()
    fully_shard(net.a)
    fully_shard(net.b)
    fully_shard(net)
    optim = SharpLion(net.parameters(), lr=args.lr)
    x, y = rows()

    def closure_for(step):
        pick = torch.randperm(len(x), generator=torch.Generator().manual_seed(step)).narrow(0, 0, args.batch)
        pick = pick[rank * args.batch // world : (rank + 1) * args.batch // world]

        def closure():
            optim.zero_grad()
            loss = F.mse_loss(net(x[pick]), y[pick])
            loss.backward()
            return loss.detach()

        return closure

    def everything(step):
        m, o = get_state_dict(net, optim)
        return {"m": m, "o": o, "step": step}

    done = 0
    if args.resume:
        # the optimizer makes its state at the first step: give it empty entries of the right shape to load into
        path = os.path.join(args.resume, max(os.listdir(args.resume)))
        for p in net.parameters():
            optim.state[p] = {"step": torch.zeros(()), "m": torch.zeros_like(p), "slow": p.detach().clone()}
        s = everything(0)
        dcp.load(s, checkpoint_id=path)
        set_state_dict(net, optim, model_state_dict=s["m"], optim_state_dict=s["o"])
        done = s["step"]

    for step in range(done, args.steps):
        loss = optim.step(closure_for(step))
        if (step + 1) % args.perturb_every == 0:
            shrink_and_perturb(net, step, keep=0.98, sigma=0.01)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step:3d} loss {loss / world:.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(everything(step + 1), checkpoint_id=os.path.join(args.out, f"{step + 1:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
