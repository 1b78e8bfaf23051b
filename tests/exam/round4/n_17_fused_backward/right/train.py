"""Sensor autoencoder whose optimizer steps run inside the backward pass: one small optimizer per parameter, fired by
the hook that FSDP calls as soon as the reduced gradient of the shard is there. No gradient outlives the backward."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class VAE(nn.Module):
    def __init__(self, d=20, width=32, z=3):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, width), nn.Tanh(), nn.Linear(width, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, width), nn.Tanh(), nn.Linear(width, d))

    def forward(self, x, eps):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        rec = self.dec(mu + eps * (0.5 * logvar).exp())
        kl = 0.5 * (mu**2 + logvar.exp() - 1 - logvar).sum(1)
        return (rec - x).pow(2).sum(1), kl


class InBackward:
    def __init__(self, model, steps, lr=0.01):
        self.steps, self.base, self.t, self.fired = steps, lr, 0, 0
        self.opts = {}
        for p in model.parameters():
            self.opts[p] = torch.optim.Adam([p], lr=lr)
            p.register_post_accumulate_grad_hook(self.fire)

    def lr(self):
        return self.base * 0.5 * (1 + math.cos(math.pi * self.t / self.steps))

    def fire(self, p):
        opt = self.opts[p]
        opt.param_groups[0]["lr"] = self.lr()
        opt.step()
        opt.zero_grad(set_to_none=True)
        self.fired += 1

    def finish(self):
        assert self.fired == len(self.opts), f"{self.fired} of {len(self.opts)} parameters were stepped"
        self.fired = 0
        self.t += 1


def sensors(n=512, d=20, seed=61):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 3, generator=g)
    mix = torch.randn(3, d, generator=g)
    return torch.tanh(z @ mix) + 0.05 * torch.randn(n, d, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    x = sensors()
    model = VAE()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.enc, mesh=mesh)
    fully_shard(model.dec, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fused = InBackward(model, args.steps)

    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        pick = torch.randint(len(x), (args.batch,), generator=g)
        eps = torch.randn(args.batch, 3, generator=g)  # drawn for the whole batch, then cut
        rec, kl = model(x[pick.chunk(world)[rank]], eps.chunk(world)[rank])
        beta = min(1.0, step / 15) * 0.2
        (rec + beta * kl).mean().backward()
        fused.finish()
        shown = torch.stack([rec.detach().mean(), kl.detach().mean()])
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} rec {shown[0] / world:.4f} kl {shown[1] / world:.4f} beta {beta:.2f}", flush=True)

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
