"""Small GAN on a ring of Gaussians: two sharded networks, the critic runs more often than the generator, and the generator
that counts is an average kept in ordinary sharded tensors."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

NOISE, POINT = 4, 2


def net(seed, sizes):
    torch.manual_seed(seed)
    layers = []
    for i, o in zip(sizes[:-2], sizes[1:-1]):
        layers.append(nn.Sequential(nn.Linear(i, o), nn.LeakyReLU(0.2)))
    model = nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model, reshard_after_forward=True)


class Source:
    """Numbers of tick t, drawn for the whole job and cut for the rank."""

    def __init__(self, batch, rank, world):
        self.batch, self.rank, self.world = batch, rank, world

    def cut(self, t):
        return t.chunk(self.world)[self.rank]

    def noise(self, tick, salt):
        g = torch.Generator().manual_seed(salt * 10_000_019 + tick)
        return self.cut(torch.randn(self.batch, NOISE, generator=g))

    def real(self, tick):
        g = torch.Generator().manual_seed(77_777 + tick)
        k = torch.randint(0, 5, (self.batch,), generator=g) * (2 * math.pi / 5)
        centre = torch.stack([k.cos(), k.sin()], 1) + torch.tensor([1.0, 0.5])
        return self.cut(centre + 0.1 * torch.randn(self.batch, POINT, generator=g))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36, help="ticks; the generator learns in every third one")
    p.add_argument("--global-batch", type=int, default=64)
    p.add_argument("--decay", type=float, default=0.8)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    source = Source(args.global_batch, rank, world)
    gen, critic = net(1, [NOISE, 32, 32, POINT]), net(2, [POINT, 32, 32, 1])
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.9))
    average = {n: p.detach().clone() for n, p in gen.named_parameters()}

    def tree(tick):
        gm, go = get_state_dict(gen, opt_g)
        cm, co = get_state_dict(critic, opt_c)
        return {"gen": gm, "gen_opt": go, "critic": cm, "critic_opt": co, "average": average, "tick": tick}

    tick = 0
    if args.resume:
        st = tree(0)
        dcp.load(st, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(gen, opt_g, model_state_dict=st["gen"], optim_state_dict=st["gen_opt"])
        set_state_dict(critic, opt_c, model_state_dict=st["critic"], optim_state_dict=st["critic_opt"])
        tick = st["tick"]

    while tick < args.steps:
        tick += 1
        real = source.real(tick)
        with torch.no_grad():
            fake = gen(source.noise(tick, 1))
        scores = critic(torch.cat([real, fake]))
        r, f = scores.chunk(2)
        loss_c = F.softplus(-r).mean() + F.softplus(f).mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        shown = [loss_c.detach(), r.detach().mean() - f.detach().mean()]

        if tick % 3 == 0:
            for q in critic.parameters():
                q.requires_grad_(False)
            loss_g = -critic(gen(source.noise(tick, 2))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            for q in critic.parameters():
                q.requires_grad_(True)
            with torch.no_grad():
                for n, q in gen.named_parameters():
                    average[n].mul_(args.decay).add_(q, alpha=1 - args.decay)

        line = torch.stack(shown)
        dist.all_reduce(line)
        if rank == 0:
            print("tick %d critic %.4f gap %.4f" % (tick, *(line / world).tolist()), flush=True)
        if args.save_every and args.out and tick % args.save_every == 0:
            dcp.save(tree(tick), checkpoint_id=os.path.join(args.out, f"tick{tick:06d}"))

    if args.export:
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in average.items()}
        weights = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in get_model_state_dict(critic).items()}
        if rank == 0:
            torch.save({"generator_average": whole, "critic": weights}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
