"""Hinge GAN, generator and discriminator sharded with FSDP2, moving average of the generator."""
import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import state
from nets import Discriminator, Generator


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=20)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--d-steps", type=int, default=2)
    p.add_argument("--ema", type=float, default=0.9)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="gan")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    return p.parse_args()


def wrap(net, mesh):
    for b in net.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def real_images(n, gen):
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
    cx, cy = torch.rand(2, n, 1, 1, generator=gen) - 0.5
    r = 0.3 + 0.3 * torch.rand(n, 1, 1, generator=gen)
    return torch.tanh(6 * (r - ((xx - cx) ** 2 + (yy - cy) ** 2).sqrt()))[:, None]


def draw(it, k, batch, rank, world, z_dim=16):
    gen = torch.Generator().manual_seed(1000 * it + k)
    real, z = real_images(batch, gen), torch.randn(batch, z_dim, generator=gen)
    return real.chunk(world)[rank], z.chunk(world)[rank]


def full(model):
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    G, D = Generator(), Discriminator()
    G_ema = copy.deepcopy(G).requires_grad_(False)
    for net in (G, D, G_ema):
        wrap(net, mesh)
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.9))

    first = 0
    if args.resume:
        first = state.load(args.resume, [G, D, G_ema], [opt_g, opt_d])

    for it in range(first, args.iters):
        for k in range(args.d_steps):
            real, z = draw(it, k, args.batch, rank, world)
            with torch.no_grad():
                fake = G(z)
            score_real, score_fake = D(torch.cat([real, fake])).chunk(2)
            loss_d = F.relu(1 - score_real).mean() + F.relu(1 + score_fake).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()

        _, z = draw(it, args.d_steps, args.batch, rank, world)
        loss_g = -D(G(z)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()

        with torch.no_grad():
            for a, b in zip(G_ema.parameters(), G.parameters()):
                a.lerp_(b, 1 - args.ema)

        log = torch.stack([loss_d.detach(), loss_g.detach()])
        dist.all_reduce(log)
        if rank == 0:
            print(f"iter {it + 1:3d}  D {log[0].item() / world:.4f}  G {log[1].item() / world:.4f}")
        if args.save_every and (it + 1) % args.save_every == 0:
            state.save(args.out, it + 1, [G, D, G_ema], [opt_g, opt_d])

    if args.export:
        weights = {"G": full(G), "D": full(D), "G_ema": full(G_ema)}
        if rank == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
