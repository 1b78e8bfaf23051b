"""GAN on short waveforms; samples are judged with an exponential moving average of the generator."""
import argparse
import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

LEN, ZDIM = 24, 8


def real_waves(n, step):
    g = torch.Generator().manual_seed(40000 + step)
    t = torch.arange(LEN) / LEN
    amp = 0.6 + 0.4 * torch.rand(n, 1, generator=g)
    return amp * torch.sin(2 * math.pi * (2 * t + torch.rand(n, 1, generator=g)))


def latent(n, step, salt):
    return torch.randn(n, ZDIM, generator=torch.Generator().manual_seed(3 * step + salt))


class Mlp(nn.Module):
    def __init__(self, i, o, h=32):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(i, h), nn.Linear(h, h)])
        self.out = nn.Linear(h, o)

    def forward(self, x):
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
        return self.out(x)


def shard(net):
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net, reshard_after_forward=True)


class Ema:
    def __init__(self, net, decay=0.9):
        self.params = dict(net.named_parameters())
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in self.params.items()}

    @torch.no_grad()
    def update(self):
        for n, p in self.params.items():
            self.shadow[n].lerp_(p, 1 - self.decay)

    @contextlib.contextmanager
    def swapped(self):
        with torch.no_grad():
            live = {n: p.detach().clone() for n, p in self.params.items()}
            for n, p in self.params.items():
                p.copy_(self.shadow[n])
            yield
            for n, p in self.params.items():
                p.copy_(live[n])


def spectrum_gap(gen, rank, world):
    """Distance of the mean power spectrum of samples to that of real waves."""
    fake = torch.fft.rfft(gen(latent(64, 1, 99)[rank::world])).abs().square().sum(0)
    real = torch.fft.rfft(real_waves(64, 77)[rank::world]).abs().square().sum(0)
    both = torch.stack([fake, real])
    dist.all_reduce(both)
    return (both[0] - both[1]).abs().sum().item() / both[1].sum().item()


def snapshot(gen, disc, og, od, ema, step):
    g, ogs = get_state_dict(gen, og)
    d, ods = get_state_dict(disc, od)
    return {"gen": g, "disc": d, "opt_gen": ogs, "opt_disc": ods, "ema": ema.shadow, "step": torch.tensor(step)}


def save(folder, step, *parts):
    dcp.save(snapshot(*parts, step), checkpoint_id=os.path.join(folder, f"gan_{step:05d}"))


def resume(folder, gen, disc, og, od, ema):
    done = sorted(d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, ".metadata")))
    sd = snapshot(gen, disc, og, od, ema, 0)
    dcp.load(sd, checkpoint_id=os.path.join(folder, done[-1]))
    set_state_dict(gen, og, model_state_dict=sd["gen"], optim_state_dict=sd["opt_gen"])
    set_state_dict(disc, od, model_state_dict=sd["disc"], optim_state_dict=sd["opt_disc"])
    return int(sd["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--eval-every", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="gan")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    gen, disc = shard(Mlp(ZDIM, LEN)), shard(Mlp(LEN, 1))
    og = torch.optim.Adam(gen.parameters(), lr=4e-3, betas=(0.5, 0.99))
    od = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.99))
    ema = Ema(gen)
    start = resume(args.resume, gen, disc, og, od, ema) if args.resume else 0

    for step in range(start + 1, args.steps + 1):
        x = real_waves(args.batch, step)[rank::world]
        with torch.no_grad():
            fake = gen(latent(args.batch, step, 0)[rank::world])
        d_loss = F.softplus(-disc(x)).mean() + F.softplus(disc(fake)).mean()
        od.zero_grad()
        d_loss.backward()
        od.step()

        g_loss = F.softplus(-disc(gen(latent(args.batch, step, 1)[rank::world]))).mean()
        og.zero_grad()
        g_loss.backward()
        og.step()
        ema.update()

        due = args.save_every and step % args.save_every == 0
        if due or step % args.eval_every == 0:
            with ema.swapped():
                gap = spectrum_gap(gen, rank, world)
                if due:
                    save(args.out, step, gen, disc, og, od, ema)
            both = torch.stack([d_loss.detach(), g_loss.detach()]) / world
            dist.all_reduce(both)
            if rank == 0:
                print(f"step {step:3d} d_loss {both[0]:.4f} g_loss {both[1]:.4f} spectrum gap {gap:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
