import torch
import torch.nn as nn
import torch.nn.functional as F


class ResBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.b(F.silu(self.a(x)))


class Generator(nn.Module):
    def __init__(self, noise=8, length=32, dim=32):
        super().__init__()
        self.inp = nn.Linear(noise, dim)
        self.blocks = nn.ModuleList([ResBlock(dim), ResBlock(dim)])
        self.out = nn.Linear(dim, length)

    def forward(self, z):
        h = self.inp(z)
        for b in self.blocks:
            h = b(h)
        return self.out(F.silu(h))


class Critic(nn.Module):
    """Scores a signal by its samples or, for `spectral`, by its Fourier amplitudes."""

    def __init__(self, spectral, length=32, dim=24):
        super().__init__()
        self.spectral = spectral
        self.inp = nn.Linear(length // 2 + 1 if spectral else length, dim)
        self.block = ResBlock(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        if self.spectral:
            f = torch.fft.rfft(x)
            x = (f.real.square() + f.imag.square() + 1e-2).sqrt()
        return self.out(F.silu(self.block(self.inp(x))))
