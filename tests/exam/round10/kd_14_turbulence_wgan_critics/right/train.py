"""Wasserstein GAN with two weight-clipped critics (signal and spectrum) for synthetic turbulence."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.fsdp import fully_shard

from nets import Critic, Generator
from spectra import log_spectrum, signals

NOISE, BATCH, CRITIC_STEPS, CLIP = 8, 32, 3, 0.15


class Player:
    """A network with its optimizer."""

    def __init__(self, net, lr):
        for m in net.modules():
            if type(m).__name__ == "ResBlock":
                fully_shard(m)
        fully_shard(net)
        self.net = net
        self.opt = torch.optim.RMSprop(net.parameters(), lr=lr, eps=1e-2)

    def state(self):
        model, opt = get_state_dict(self.net, self.opt)
        return {"model": model, "opt": opt}

    def restore(self, s):
        set_state_dict(self.net, self.opt, model_state_dict=s["model"], optim_state_dict=s["opt"])


class Noise:
    """Noise and sample indices for the global batch from one stream; every rank draws all and keeps its part."""

    def __init__(self, rank, world, seed):
        self.rank, self.world = rank, world
        self.g = torch.Generator().manual_seed(seed)

    def z(self):
        return torch.randn(BATCH, NOISE, generator=self.g).chunk(self.world)[self.rank]

    def ids(self, n):
        return torch.randint(0, n, (BATCH,), generator=self.g).chunk(self.world)[self.rank]


def critic_step(critic, gen, noise, data):
    with torch.no_grad():
        fake = gen.net(noise.z())
    real = data[noise.ids(len(data))]
    score = critic.net(torch.cat([real, fake])).squeeze(-1)
    gap = score[:len(real)].mean() - score[len(real):].mean()
    (-gap).backward()
    critic.opt.step()
    critic.opt.zero_grad()
    with torch.no_grad():
        for p in critic.net.parameters():
            p.clamp_(-CLIP, CLIP)
    return gap.detach()


def generator_step(gen, critics, noise):
    fake = gen.net(noise.z())
    loss = -sum(c.net(fake).mean() for c in critics)
    loss.backward()
    gen.opt.step()
    gen.opt.zero_grad()
    # the generator's loss leaves gradients in the critics too
    for c in critics:
        c.opt.zero_grad()


def spectrum_error(gen, data):
    z = torch.randn(128, NOISE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return (log_spectrum(gen.net(z)) - log_spectrum(data)).abs().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=20, help="generator steps")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    data = signals()
    gen = Player(Generator(), lr=4e-4)
    critics = [Player(Critic(spectral=False), lr=3e-4), Player(Critic(spectral=True), lr=3e-4)]
    players = {"gen": gen, "time": critics[0], "freq": critics[1]}
    noise = Noise(rank, world, seed=99)

    done = 0
    if args.resume:
        done = max(int(d[1:]) for d in os.listdir(args.resume) if d[0] == "r" and d[1:].isdigit())
        state = {k: p.state() for k, p in players.items()}
        state["noise"] = noise.g.get_state()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"r{done}"))
        for k, p in players.items():
            p.restore(state[k])
        noise.g.set_state(state["noise"])

    for r in range(done, args.rounds):
        gaps = torch.zeros(2)
        for _ in range(CRITIC_STEPS):
            gaps = torch.stack([critic_step(c, gen, noise, data) for c in critics])
        generator_step(gen, critics, noise)
        if (r + 1) % 4 == 0:
            dist.all_reduce(gaps)
            err = spectrum_error(gen, data)
            if rank == 0:
                print(f"round {r + 1} critic gaps {(gaps / world).tolist()} log-spectrum error {err:.4f}", flush=True)
        if args.save_every and (r + 1) % args.save_every == 0:
            state = {k: p.state() for k, p in players.items()}
            dcp.save({**state, "noise": noise.g.get_state()}, checkpoint_id=os.path.join(args.out, f"r{r + 1}"))

    full = {}
    for k, p in players.items():
        weights = get_model_state_dict(p.net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        full.update({f"{k}.{n}": w for n, w in weights.items()})
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
