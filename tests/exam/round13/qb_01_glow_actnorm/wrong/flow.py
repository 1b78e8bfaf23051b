"""A small Glow: squeeze, then K steps of (actnorm, channel flip, affine coupling)."""
import math

import torch
import torch.nn.functional as F
from torch import nn


class ActNorm(nn.Module):
    """Per-channel affine map; the first batch it sees fixes mean 0 and variance 1 of its output."""

    def __init__(self, channels):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.log_scale = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.ready = False

    @torch.no_grad()
    def data_init(self, x):
        mean = x.mean(dim=(0, 2, 3), keepdim=True)
        std = x.std(dim=(0, 2, 3), keepdim=True)
        self.loc.data.copy_(-mean)
        self.log_scale.data.copy_(-(std + 1e-6).log())
        self.ready = True

    def forward(self, x):
        if not self.ready:
            self.data_init(x)
        y = (x + self.loc) * self.log_scale.exp()
        return y, self.log_scale.sum() * x.shape[2] * x.shape[3]


class Coupling(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.half = channels // 2
        self.net = nn.Sequential(
            nn.Conv2d(self.half, hidden, 3, padding=1), nn.ReLU(),
            nn.Conv2d(hidden, hidden, 1), nn.ReLU(),
            nn.Conv2d(hidden, channels, 3, padding=1),
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x[:, : self.half], x[:, self.half:]
        shift, raw = self.net(a).chunk(2, dim=1)
        log_s = 0.5 * torch.tanh(raw)
        return torch.cat([a, (b + shift) * log_s.exp()], dim=1), log_s.flatten(1).sum(1)


class FlowStep(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.norm = ActNorm(channels)
        self.coupling = Coupling(channels, hidden)

    def forward(self, x):
        x, ld0 = self.norm(x)
        x, ld1 = self.coupling(x.flip(1))
        return x, ld0 + ld1


class Glow(nn.Module):
    def __init__(self, hidden=24, steps=4):
        super().__init__()
        self.steps = nn.ModuleList(FlowStep(4, hidden) for _ in range(steps))
        self.prior_mean = nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, images):
        """Bits per dimension of each image."""
        z = F.pixel_unshuffle(images, 2)
        logdet = images.new_zeros(len(images))
        for step in self.steps:
            z, ld = step(z)
            logdet = logdet + ld
        logp = -0.5 * ((z - self.prior_mean) ** 2 + math.log(2 * math.pi))
        nll = -(logp.flatten(1).sum(1) + logdet)
        return nll / (math.log(2) * images[0].numel())
