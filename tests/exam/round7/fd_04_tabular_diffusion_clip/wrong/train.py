"""Denoising diffusion for a table of sensor readings (FSDP2, hand-written clipping, plain files as checkpoints)."""
import argparse
import math
import os
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

T = 100
COLS = 10


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.time = nn.Linear(16, d)
        self.norm = nn.LayerNorm(d)

    def forward(self, h, temb):
        return h + torch.nn.functional.silu(self.lin(self.norm(h)) + self.time(temb))


class Denoiser(nn.Module):
    def __init__(self, d=64, depth=4):
        super().__init__()
        self.inp = nn.Linear(COLS, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.out = nn.Linear(d, COLS)

    def forward(self, x, t):
        freq = torch.exp(torch.arange(8) * (-math.log(1000.0) / 8))
        ang = t[:, None].float() * freq
        temb = torch.cat([ang.sin(), ang.cos()], -1)
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h, temb)
        return self.out(h)


def sample_rows(n, g):
    z = torch.randn(n, 3, generator=g)
    mix = torch.linspace(-2, 2, 3 * COLS).view(3, COLS).sin()
    return torch.tanh(z @ mix) * 2 + 0.1 * torch.randn(n, COLS, generator=g)


@torch.no_grad()
def clip_gradients(params, max_norm):
    """Scale the gradients of sharded parameters to a global norm of at most max_norm; returns the norm."""
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    total = torch.zeros(())
    for g in grads:
        total += g.square().sum()
    total = total.sqrt()
    dist.all_reduce(total)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=40)
    ap.add_argument("--clip", type=float, default=0.15)
    ap.add_argument("--lr", type=float, default=0.2)
    ap.add_argument("--ckpt-dir")
    ap.add_argument("--ckpt-every", type=int, default=15)
    ap.add_argument("--resume-from")
    ap.add_argument("--final")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(7)
    model = Denoiser()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=args.lr, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.iters)
    abar = torch.cos(torch.linspace(0, 1, T) * math.pi / 2 * 0.98) ** 2

    # one stream of random numbers for the global batch, the same on all ranks
    g = torch.Generator().manual_seed(123)
    it = 0

    if args.resume_from:
        found = [int(m[1]) for f in os.listdir(args.resume_from) if (m := re.fullmatch(r"it(\d+)_rank0\.pt", f))]
        st = torch.load(f"{args.resume_from}/it{max(found)}_rank{rank}.pt", weights_only=True)
        assert st["world"] == world
        with torch.no_grad():
            for p, w in zip(params, st["weights"]):
                p.to_local().copy_(w)
        for p, m in zip(params, st["momentum"]):
            opt.state[p]["momentum_buffer"] = DTensor.from_local(
                m, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        sched.load_state_dict(st["sched"])
        opt.param_groups[0]["lr"] = st["lr"]
        g.set_state(st["rng"])
        it = st["it"]

    while it < args.iters:
        x0 = sample_rows(256, g)
        t = torch.randint(0, T, (256,), generator=g)
        eps = torch.randn(256, COLS, generator=g)
        x0, t, eps = (v.chunk(world)[rank] for v in (x0, t, eps))
        a = abar[t][:, None]
        loss = (model(a.sqrt() * x0 + (1 - a).sqrt() * eps, t) - eps).square().mean()
        loss.backward()
        norm = clip_gradients(params, args.clip)
        opt.step()
        opt.zero_grad(set_to_none=True)
        sched.step()
        it += 1

        l = loss.detach()
        dist.all_reduce(l)
        if rank == 0 and it % 10 == 0:
            print(f"it {it} loss {l.item() / world:.4f} grad norm {norm.item():.3f}")

        if args.ckpt_dir and it % args.ckpt_every == 0 and it < args.iters:
            os.makedirs(args.ckpt_dir, exist_ok=True)
            torch.save({
                "world": world, "it": it, "rng": g.get_state(), "sched": sched.state_dict(),
                "lr": opt.param_groups[0]["lr"],
                "weights": [p.detach().to_local().clone() for p in params],
                "momentum": [opt.state[p]["momentum_buffer"].to_local().clone() for p in params],
            }, f"{args.ckpt_dir}/it{it}_rank{rank}.pt")
            dist.barrier()

    full = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
    if rank == 0:
        print("weight norm", sum(v.square().sum() for v in full.values()).sqrt().item())
        if args.final:
            torch.save(full, args.final)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
