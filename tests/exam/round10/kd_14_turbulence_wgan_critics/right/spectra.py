"""Velocity signals with a power-law spectrum, the real data of the generator."""
import torch


def signals(n=256, length=32, seed=61):
    g = torch.Generator().manual_seed(seed)
    k = torch.arange(1, length // 2 + 1).float()
    amp = k ** (-5 / 6)
    phase = torch.rand(n, len(k), generator=g) * 2 * torch.pi
    gain = 0.5 + torch.rand(n, len(k), generator=g)
    t = torch.arange(length).float() / length
    x = (gain[..., None] * amp[:, None] * torch.cos(2 * torch.pi * k[:, None] * t + phase[..., None])).sum(1)
    return x / x.std()


def log_spectrum(x):
    return torch.fft.rfft(x).abs().square()[:, 1:].mean(0).add(1e-6).log()
