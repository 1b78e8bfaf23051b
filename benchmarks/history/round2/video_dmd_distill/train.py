"""Distribution matching distillation of a video diffusion model into a few-step generator.

Three networks: the generator (trained), the real score (the teacher, here the exact denoiser
of the toy data) and the fake score (a critic that follows the generator).  Videos are
sequences of latent frames, conditioned on a prompt id.
"""
import argparse
import os
from itertools import count

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NUM_TRAIN_TIMESTEPS = 1000
FRAMES, CHANNELS, PROMPTS = 6, 4, 8


def sigma_of(timestep):
    return (timestep.float() / NUM_TRAIN_TIMESTEPS)[:, None, None]


def add_noise(x0, noise, timestep):
    sigma = sigma_of(timestep)
    return (1 - sigma) * x0 + sigma * noise


def shift_timestep(timestep, shift):
    t = timestep.float() / NUM_TRAIN_TIMESTEPS
    return (shift * t / (1 + (shift - 1) * t) * NUM_TRAIN_TIMESTEPS).round().long()


class RealScore(nn.Module):
    """Posterior mean E[x0 | x_t, prompt] for x0 ~ N(mean[prompt], std^2)."""

    def __init__(self, std=0.2):
        super().__init__()
        g = torch.Generator().manual_seed(1234)
        phase = torch.rand(PROMPTS, 1, CHANNELS, generator=g) * 6.28
        speed = torch.rand(PROMPTS, 1, CHANNELS, generator=g) * 1.5
        frames = torch.arange(FRAMES, dtype=torch.float)[None, :, None]
        self.register_buffer("mean", torch.sin(phase + speed * frames))
        self.std = std

    def forward(self, x, timestep, prompt):
        sigma, mean, var = sigma_of(timestep), self.mean[prompt], self.std ** 2
        gain = (1 - sigma) * var / ((1 - sigma) ** 2 * var + sigma ** 2)
        return mean + gain * (x - (1 - sigma) * mean)


class DiTBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.modulation = nn.Linear(dim, 2 * dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, cond):
        scale, shift = self.modulation(cond).unsqueeze(1).chunk(2, dim=-1)
        q, k, v = self.qkv(self.norm1(x) * (1 + scale) + shift).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v))
        return x + self.ffn(self.norm2(x))


class VideoDiT(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.dim = dim
        self.patch_embed = nn.Linear(CHANNELS, dim)
        self.frame_embed = nn.Parameter(torch.randn(1, FRAMES, dim) * 0.02)
        self.prompt_embed = nn.Embedding(PROMPTS, dim)
        self.time_embed = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(DiTBlock(dim) for _ in range(depth))
        self.proj_out = nn.Linear(dim, CHANNELS)

    def forward(self, x, timestep, prompt):
        freqs = 2.0 ** torch.arange(self.dim // 2, device=x.device).div(2.0)
        angles = timestep.float()[:, None] / NUM_TRAIN_TIMESTEPS * freqs
        cond = self.time_embed(torch.cat([angles.sin(), angles.cos()], dim=-1)) + self.prompt_embed(prompt)
        h = self.patch_embed(x) + self.frame_embed
        for block in self.blocks:
            h = block(h, cond)
        return self.proj_out(h)


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class GeneratorEMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p.detach(), 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, model):
        for n, p in model.named_parameters():
            p.copy_(self.shadow[n])


class DistillationPipeline:
    def __init__(self, args, mesh, device):
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.generator = shard(VideoDiT().to(device), mesh)
        self.fake_score = shard(VideoDiT().to(device), mesh)
        self.real_score = RealScore().to(device)
        self.ema = GeneratorEMA(self.generator, args.ema_decay)
        self.g_optim = torch.optim.AdamW(self.generator.parameters(), lr=args.lr, betas=(0.0, 0.999))
        self.f_optim = torch.optim.AdamW(self.fake_score.parameters(), lr=args.fake_score_lr, betas=(0.0, 0.999))
        self.min_timestep = int(args.min_timestep_ratio * NUM_TRAIN_TIMESTEPS)
        self.max_timestep = int(args.max_timestep_ratio * NUM_TRAIN_TIMESTEPS)

    def next_videos(self, step):
        """A random stream for each of this rank's videos of the step, and the prompts."""
        first = step * self.args.batch_size
        ids = range(first + self.rank, first + self.args.batch_size, self.world)
        self.streams = [torch.Generator().manual_seed(self.args.seed * 7919 + i) for i in ids]
        return torch.cat([torch.randint(PROMPTS, (1,), generator=g) for g in self.streams]).to(self.device)

    def randn(self):
        return torch.stack([torch.randn(FRAMES, CHANNELS, generator=g) for g in self.streams]).to(self.device)

    def sample_timestep(self):
        timestep = torch.cat([torch.randint(NUM_TRAIN_TIMESTEPS, (1,), generator=g) for g in self.streams])
        timestep = timestep.to(self.device)
        timestep = shift_timestep(timestep, self.args.timestep_shift)
        return timestep.clamp(self.min_timestep, self.max_timestep)

    def generate(self, prompt):
        start = torch.full((len(prompt),), NUM_TRAIN_TIMESTEPS, device=self.device)
        return self.generator(self.randn(), start, prompt)

    def dmd_loss(self, prompt):
        video = self.generate(prompt)
        with torch.no_grad():
            timestep = self.sample_timestep()
            noisy = add_noise(video, self.randn(), timestep)
            fake = self.fake_score(noisy, timestep, prompt)
            real = self.real_score(noisy, timestep, prompt)
            normalizer = (video - real).abs().mean(dim=(1, 2), keepdim=True)
            grad = (fake - real) / normalizer.clamp_min(0.1)
        return 0.5 * F.mse_loss(video, (video - grad).detach())

    def fake_score_loss(self, prompt):
        with torch.no_grad():
            video = self.generate(prompt)
        timestep = self.sample_timestep()
        pred = self.fake_score(add_noise(video, self.randn(), timestep), timestep, prompt)
        return F.mse_loss(pred, video)

    def optimize(self, loss, model, optimizer):
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss.item() / self.world

    def train(self):
        steps = count(0)
        for it in range(1, self.args.max_train_steps + 1):
            f_loss = self.optimize(self.fake_score_loss(self.next_videos(next(steps))), self.fake_score, self.f_optim)
            if it % self.args.generator_update_interval == 0:
                g_loss = self.optimize(self.dmd_loss(self.next_videos(next(steps))), self.generator, self.g_optim)
                self.ema.update(self.generator)
                if self.rank == 0 and it % 8 == 0:
                    print(f"step {it} generator_loss {g_loss:.6f} fake_score_loss {f_loss:.6f}", flush=True)

    @torch.no_grad()
    def validate(self):
        self.ema.copy_to(self.generator)
        prompt = self.next_videos(100_000)
        error = F.mse_loss(self.generate(prompt), self.real_score.mean[prompt])
        dist.all_reduce(error)
        return error.item() / self.world


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-train-steps", type=int, default=32)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--fake-score-lr", type=float, default=3e-3)
    p.add_argument("--generator-update-interval", type=int, default=2)
    p.add_argument("--timestep-shift", type=float, default=3.0)
    p.add_argument("--min-timestep-ratio", type=float, default=0.02)
    p.add_argument("--max-timestep-ratio", type=float, default=0.98)
    p.add_argument("--ema-decay", type=float, default=0.9)
    p.add_argument("--max-grad-norm", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=1000)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    pipeline = DistillationPipeline(args, init_device_mesh(device.type, (dist.get_world_size(),)), device)
    pipeline.train()
    error = pipeline.validate()
    if dist.get_rank() == 0:
        print(f"validation error to the teacher's videos {error:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
