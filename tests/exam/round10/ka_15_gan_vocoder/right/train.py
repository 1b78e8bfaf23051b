"""Adversarial training of a small vocoder: spectrogram in, waveform out.

Per step: one discriminator update on the detached waveform, then one generator update through the same waveform with
hinge, feature-matching and spectral losses. A moving average of the generator is what is validated and shipped.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

HOP, BINS, FRAMES = 16, 17, 16
WARMUP = 4  # generator-only steps before the discriminator joins


def stft(wave, n=32, hop=HOP):
    window = torch.hann_window(n)
    spec = torch.view_as_real(torch.stft(wave, n, hop, window=window, return_complex=True))
    return (spec.square().sum(-1) + 1e-2).sqrt()


def batch(step, n):
    g = torch.Generator().manual_seed(24_000 + step)
    t = torch.arange(HOP * FRAMES) / (HOP * FRAMES)
    f0 = 4 + 12 * torch.rand(n, 1, generator=g)
    sweep = 6 * torch.rand(n, 1, generator=g)
    phase = 2 * torch.pi * (f0 * t + sweep * t * t)
    wave = 0.6 * phase.sin() + 0.3 * (2 * phase).sin() + 0.02 * torch.randn(n, len(t), generator=g)
    noise = torch.randn(n, 4, FRAMES, generator=g)
    return wave, stft(wave)[..., :FRAMES].log(), noise


class Generator(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.inp = nn.Conv1d(BINS + 4, dim, 3, padding=1)
        self.up1 = nn.ConvTranspose1d(dim, dim, 8, stride=4, padding=2)
        self.up2 = nn.ConvTranspose1d(dim, dim // 2, 8, stride=4, padding=2)
        self.out = nn.Conv1d(dim // 2, 1, 7, padding=3)

    def forward(self, mel, noise):
        x = F.silu(self.inp(torch.cat([mel, noise], 1)))
        x = F.silu(self.up1(x))
        x = F.silu(self.up2(x))
        return torch.tanh(self.out(x)).squeeze(1)


class Scale(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool
        self.convs = nn.ModuleList([nn.Conv1d(1, 12, 7, 2, 3), nn.Conv1d(12, 16, 7, 2, 3), nn.Conv1d(16, 1, 3, 1, 1)])

    def forward(self, wave):
        x = F.avg_pool1d(wave[:, None], self.pool)
        maps = []
        for conv in self.convs[:-1]:
            x = F.silu(conv(x))
            maps.append(x)
        return self.convs[-1](x).flatten(1), maps


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ModuleList(Scale(p) for p in (1, 2))

    def forward(self, wave):
        return [scale(wave) for scale in self.scales]


def discriminator_loss(disc, real, fake):
    loss = 0.0
    for score, _ in disc(torch.cat([real, fake])):
        r, f = score.chunk(2)
        loss = loss + F.relu(1 - r).mean() + F.relu(1 + f).mean()
    return loss


def adversarial_loss(disc, real, fake):
    loss = 0.0
    for score, maps in disc(torch.cat([real, fake])):
        loss = loss - score.chunk(2)[1].mean()
        for m in maps:
            r, f = m.chunk(2)
            loss = loss + 4.0 * F.mse_loss(f, r.detach())
    return loss


def newest(root):
    return max((int(f[:-3].split("_")[1]), os.path.join(root, f)) for f in os.listdir(root) if f.startswith("r0_"))[0]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    steps, size = 18, 8
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(404)
    gen, disc, average = Generator(), Discriminator(), Generator()
    average.load_state_dict(gen.state_dict())
    average.requires_grad_(False)
    for scale in disc.scales:
        fully_shard(scale)
    for net in (gen, disc, average):
        fully_shard(net)
    opt_g = torch.optim.AdamW(gen.parameters(), lr=4e-3, betas=(0.8, 0.99), eps=1e-5)
    opt_d = torch.optim.AdamW(disc.parameters(), lr=2e-3, betas=(0.8, 0.99), eps=1e-5)
    sched_g = torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.98)
    sched_d = torch.optim.lr_scheduler.ExponentialLR(opt_d, 0.98)
    everything = dict(gen=gen, disc=disc, average=average, opt_g=opt_g, opt_d=opt_d, sched_g=sched_g, sched_d=sched_d)

    step = 0
    if args.resume:
        step = newest(args.resume)
        saved = torch.load(os.path.join(args.resume, f"r{rank}_{step}.pt"), weights_only=False)
        for name, thing in everything.items():
            thing.load_state_dict(saved[name])

    while step < steps:
        wave, mel, noise = (x.chunk(world)[rank] for x in batch(step, size))
        fake = gen(mel, noise)
        joined = step >= WARMUP
        d_loss = torch.zeros(())
        if joined:
            d_loss = discriminator_loss(disc, wave, fake.detach())
            d_loss.backward()
            opt_d.step()
            opt_d.zero_grad()

        g_loss = 5.0 * F.mse_loss(stft(fake).log(), stft(wave).log())
        if joined:
            g_loss = g_loss + adversarial_loss(disc, wave, fake)
        g_loss.backward()
        opt_g.step()
        opt_g.zero_grad()
        opt_d.zero_grad()  # what the generator's loss left in the discriminator
        sched_g.step()
        if joined:
            sched_d.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), gen.parameters()):
                a.lerp_(p, 0.2)

        step += 1
        shown = torch.stack([g_loss.detach(), d_loss.detach()]) / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} gen {shown[0].item():.4f} disc {shown[1].item():.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({n: t.state_dict() for n, t in everything.items()}, os.path.join(args.out, f"r{rank}_{step}.pt"))
            dist.barrier()

    wave, mel, noise = (x.chunk(world)[rank] for x in batch(10_000, size))
    with torch.no_grad():
        error = F.l1_loss(stft(average(mel, noise)).log(), stft(wave).log())
    average.reshard()
    dist.all_reduce(error)
    if rank == 0:
        print(f"averaged generator, held-out log-spectral distance {error.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
