import torch


class Schedule:
    def __init__(self, steps=1000, lo=1e-4, hi=0.02):
        self.steps = steps
        beta = torch.linspace(lo, hi, steps)
        abar = torch.cumprod(1 - beta, 0)
        self.a, self.s = abar.sqrt(), (1 - abar).sqrt()

    def draw(self, step, batch, shape, rank, world, seed=5):
        """Timesteps and noise of one global batch, then this rank's part of them."""
        g = torch.Generator().manual_seed(seed * 100003 + step)
        t = torch.randint(0, self.steps, (batch,), generator=g)
        eps = torch.randn((batch, *shape), generator=g)
        return t[rank::world], eps[rank::world]

    def noise(self, x0, t, eps):
        return self.a[t].view(-1, 1, 1, 1) * x0 + self.s[t].view(-1, 1, 1, 1) * eps
