"""Sequence beta-VAE on synthetic sensor traces. The weight of the KL term grows over a given number of samples."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

LENGTH, LATENT = 32, 6


class TraceVAE(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(LENGTH, hidden), nn.Tanh(), nn.Linear(hidden, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, hidden), nn.Tanh(), nn.Linear(hidden, LENGTH))

    def forward(self, x, noise):
        mu, logvar = self.encoder(x).chunk(2, dim=-1)
        z = mu + noise * (0.5 * logvar).exp()
        recon = (self.decoder(z) - x).square().sum(-1).mean()
        kl = 0.5 * (mu.square() + logvar.exp() - 1 - logvar).sum(-1).mean()
        return recon, kl


class BetaWarmup(Stateful):
    """Linear growth of beta from 0 to `beta_max` over the first `warmup` training samples."""

    def __init__(self, beta_max, warmup, world):
        self.beta_max, self.warmup, self.world = beta_max, warmup, world
        self.seen = 0

    @property
    def beta(self):
        return self.beta_max * min(1.0, self.seen / self.warmup)

    def update(self, local_samples):
        self.seen += local_samples * self.world

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class App(Stateful):
    def __init__(self, model, opt):
        self.model, self.opt = model, opt

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])


class Progress(Stateful):
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def draw(step, n):
    """The traces of one global batch and the noise of the latent variables."""
    g = torch.Generator().manual_seed(500 + step)
    t = torch.linspace(0, 1, LENGTH)
    freq = 1 + 2 * torch.rand(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    amp = 0.5 + torch.rand(n, 1, generator=g)
    x = amp * torch.sin(2 * math.pi * freq * t + phase) + 0.05 * torch.randn(n, LENGTH, generator=g)
    return x, torch.randn(n, LATENT, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=64, help="global batch")
    ap.add_argument("--beta", type=float, default=1.0)
    ap.add_argument("--kl-warmup-samples", type=int, default=2560)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="vae")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = TraceVAE()
    for part in (model.encoder, model.decoder, model):
        fully_shard(part)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    warmup = BetaWarmup(args.beta, args.kl_warmup_samples, world)
    progress = Progress()
    state = {"app": App(model, opt), "warmup": warmup, "progress": progress}
    if args.resume:
        last = sorted(os.listdir(args.resume))[-1]
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))

    while progress.step < args.steps:
        x, noise = (t.chunk(world)[rank] for t in draw(progress.step, args.batch))
        recon, kl = model(x, noise)
        (recon + warmup.beta * kl).backward()
        opt.step()
        opt.zero_grad()
        warmup.update(len(x))
        progress.step += 1
        if progress.step % 10 == 0:
            log = torch.stack([recon.detach(), kl.detach()])
            dist.all_reduce(log)
            if rank == 0:
                print(f"step {progress.step} recon {log[0] / world:.5f} kl {log[1] / world:.5f}", flush=True)
        if args.save_every and progress.step % args.save_every == 0:
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"{progress.step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
