import torch
import torch.nn as nn


class Field(nn.Module):
    """u(t) of a damped oscillator together with its unknown frequency and damping."""

    def __init__(self, width=20):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                 nn.Linear(width, 1))
        self.physics = nn.Parameter(torch.tensor([1.0, 0.1]))   # omega, damping

    def forward(self, t, h):
        """Value and residual of u'' + 2 d u' + omega^2 u by central differences."""
        n = len(t)
        u = self.net(torch.cat([t, t + h, t - h]))
        mid, right, left = u[:n], u[n:2 * n], u[2 * n:]
        first = (right - left) / (2 * h)
        second = (right - 2 * mid + left) / h ** 2
        omega, damping = self.physics[0], self.physics[1]
        return mid.clone(), second + 2 * damping * first + omega ** 2 * mid


def observations(n=64, omega=2.0, damping=0.15, seed=3):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 4, n, dtype=torch.float64)[:, None]
    u = torch.exp(-damping * t) * torch.cos((omega ** 2 - damping ** 2) ** 0.5 * t)
    return t, u + 0.01 * torch.randn(u.shape, generator=g, dtype=torch.float64)
