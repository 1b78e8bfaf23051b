import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def timestep_features(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(1000.0) * torch.arange(half, dtype=torch.float32) / half)
    ang = t.float()[:, None] * freqs[None]
    return torch.cat([ang.cos(), ang.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, ch, tdim):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, ch)
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.temb = nn.Linear(tdim, ch)
        self.norm2 = nn.GroupNorm(4, ch)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)

    def forward(self, x, temb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.temb(temb)[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return x + h


class LatentDenoiser(nn.Module):
    """Small eps-prediction network on latents.

    The latents come from a frozen autoencoder and have an arbitrary scale, so a running mean / std
    per channel (buffers) brings them to unit scale first.
    """

    def __init__(self, channels=4, width=16, blocks=2, tdim=32, momentum=0.1):
        super().__init__()
        self.tdim = tdim
        self.momentum = momentum
        self.register_buffer("latent_mean", torch.zeros(channels))
        self.register_buffer("latent_std", torch.ones(channels))
        self.time_mlp = nn.Sequential(nn.Linear(tdim, tdim), nn.SiLU(), nn.Linear(tdim, tdim))
        self.conv_in = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList([ResBlock(width, tdim) for _ in range(blocks)])
        self.conv_out = nn.Conv2d(width, channels, 3, padding=1)

    def normalise(self, z):
        return (z - self.latent_mean[None, :, None, None]) / self.latent_std[None, :, None, None]

    @torch.no_grad()
    def update_latent_stats(self, mean, std):
        self.latent_mean.lerp_(mean, self.momentum)
        self.latent_std.lerp_(std, self.momentum)

    def forward(self, z0, noise, abar, t):
        """Returns the predicted noise for the normalised latent diffused to level abar."""
        x = self.normalise(z0)
        a = abar[:, None, None, None]
        x = a.sqrt() * x + (1 - a).sqrt() * noise
        temb = self.time_mlp(timestep_features(t, self.tdim))
        h = self.conv_in(x)
        for blk in self.blocks:
            h = blk(h, temb)
        return self.conv_out(F.silu(h))
