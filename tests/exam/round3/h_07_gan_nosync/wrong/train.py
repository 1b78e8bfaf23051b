import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import checkpoint
from models import build


def real_data(n=1024, dim=16):
    g = torch.Generator().manual_seed(21)
    basis = torch.randn(3, dim, generator=g)
    return torch.tanh(torch.randn(n, 3, generator=g) @ basis) + 0.05 * torch.randn(n, dim, generator=g)


def draw(step, salt, shape):
    g = torch.Generator().manual_seed(step * 10 + salt)
    return torch.randn(shape, generator=g)


def d_step(gen, disc, opt, real, z):
    opt.zero_grad()
    with torch.no_grad():
        fake = gen(z)
    score_real, score_fake = disc(torch.cat([real, fake])).chunk(2)
    loss = F.softplus(-score_real).mean() + F.softplus(score_fake).mean()
    loss.backward()
    opt.step()
    return loss.detach()


def g_step(gen, disc, opt, z):
    opt.zero_grad()
    disc.set_requires_gradient_sync(False)
    loss = F.softplus(-disc(gen(z))).mean()
    loss.backward()
    disc.set_requires_gradient_sync(True)
    opt.step()
    return loss.detach()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    gen, disc = build()
    nets = {"gen": gen, "disc": disc}
    opts = {k: torch.optim.Adam(m.parameters(), lr=args.lr, betas=(0.5, 0.99)) for k, m in nets.items()}
    start = checkpoint.load(args.resume, nets, opts) if args.resume else 0

    data = real_data()
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(step)
        real = data[torch.randint(0, len(data), (args.batch,), generator=g)].chunk(world)[rank]
        zd, zg = (draw(step, s, (args.batch, 8)).chunk(world)[rank] for s in (1, 2))
        d_loss = d_step(gen, disc, opts["disc"], real, zd)
        g_loss = g_step(gen, disc, opts["gen"], zg)
        log = torch.stack([d_loss, g_loss]) / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} d_loss {log[0]:.4f} g_loss {log[1]:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            checkpoint.save(args.out, nets, opts, step + 1)

    if args.export:
        o = StateDictOptions(full_state_dict=True, cpu_offload=True)
        out = {f"{n}.{k}": v for n, m in nets.items() for k, v in get_model_state_dict(m, options=o).items()}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
