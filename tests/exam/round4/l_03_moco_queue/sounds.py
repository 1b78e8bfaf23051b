import math

import torch


def clips(n=192, n_mels=12, frames=24, seed=8):
    """Pseudo-spectrograms: a gliding tone with its own start, slope and rate."""
    g = torch.Generator().manual_seed(seed)
    f = torch.arange(n_mels).view(1, -1, 1).float()
    t = torch.arange(frames).view(1, 1, -1).float()
    f0 = 2 + 8 * torch.rand(n, 1, 1, generator=g)
    slope = 0.2 * torch.randn(n, 1, 1, generator=g)
    rate = 1 + 3 * torch.rand(n, 1, 1, generator=g)
    mel = torch.exp(-((f - f0 - slope * t) ** 2) / 2) * (1 + 0.5 * torch.sin(2 * math.pi * rate * t / frames))
    return mel + 0.05 * torch.randn(mel.shape, generator=g)


def two_views(x, ids, step):
    a, b = x.clone(), x.clone()
    for row, i in enumerate(ids.tolist()):
        g = torch.Generator().manual_seed(i * 7919 + step)
        for v in (a, b):
            s = int(torch.randint(0, 4, (1,), generator=g))
            v[row] = torch.roll(v[row], s, 1)
            lo = int(torch.randint(0, 10, (1,), generator=g))
            v[row, lo:lo + 2] = 0
            v[row] += 0.1 * torch.randn(v[row].shape, generator=g)
    return a, b
