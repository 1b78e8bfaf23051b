import torch

BINS = 12


class NoisyStreams:
    """Endless parallel recordings. Every stream can be asked for any chunk; some chunks begin a new recording."""

    def __init__(self, ids, chunk, seed=500):
        self.ids, self.chunk, self.seed = list(ids), chunk, seed

    def at(self, step):
        noisy, clean, fresh = [], [], []
        for i in self.ids:
            g = torch.Generator().manual_seed(self.seed + 7919 * i + step)
            new = torch.rand((), generator=g).item() < 0.15
            fixed = torch.Generator().manual_seed(self.seed + i)
            speed = 0.05 + 0.1 * torch.rand(BINS, generator=fixed)
            t = torch.arange(step * self.chunk, (step + 1) * self.chunk)[:, None]
            c = torch.sin(speed * t) + 0.3 * torch.cos(0.21 * t)
            clean.append(c)
            noisy.append(c + 0.8 * torch.randn(self.chunk, BINS, generator=g))
            fresh.append(new)
        return torch.stack(noisy), torch.stack(clean), torch.tensor(fresh)
