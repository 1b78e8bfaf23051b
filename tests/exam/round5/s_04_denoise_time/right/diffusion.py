import torch


class Schedule:
    def __init__(self, horizon=1000):
        self.horizon = horizon
        self.abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, horizon), 0)

    def sample(self, x0, g):
        """one (noisy input, time, target) triple per row"""
        t = torch.randint(0, self.horizon, (len(x0),), generator=g)
        noise = torch.randn(x0.shape, generator=g)
        a = self.abar[t][:, None]
        return a.sqrt() * x0 + (1 - a).sqrt() * noise, t, noise


def clean_batch(n, g):
    phase = torch.rand(n, 1, generator=g) * 6.2832
    return torch.cat([torch.sin(phase + k) for k in range(6)], dim=1)
