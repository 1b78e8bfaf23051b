"""Synthetic mel spectrograms: a few gliding tones with noise, two voices."""
import torch

BINS, LENGTH, FRAMES = 16, 24, 12


def spectrograms(step, n):
    g = torch.Generator().manual_seed(2_000 + step)
    t = torch.arange(LENGTH)
    start = torch.rand(n, 1, generator=g) * BINS
    slope = (torch.rand(n, 1, generator=g) - 0.5) * 0.6
    center = (start + slope * t) % BINS
    bins = torch.arange(BINS)
    mel = torch.exp(-0.5 * (bins - center[..., None]) ** 2) + 0.1 * torch.randn(n, LENGTH, BINS, generator=g)
    mask = torch.rand(n, FRAMES, generator=g) < 0.4
    mask[:, 0] = True
    return mel, mask
