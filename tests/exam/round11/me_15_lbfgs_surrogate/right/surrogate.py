import torch
import torch.nn as nn


class Surrogate(nn.Module):
    """Learns the end point of a damped pendulum from its start and its constants (double precision)."""

    def __init__(self, width=24):
        super().__init__()
        self.lift = nn.Linear(4, width)
        self.core = nn.Sequential(nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.drop = nn.Linear(width, 2)

    def forward(self, x):
        return self.drop(self.core(self.lift(x)))


def simulate(n, seed, steps=60, dt=0.05):
    g = torch.Generator().manual_seed(seed)
    start = torch.rand(n, 4, generator=g, dtype=torch.float64) * 2 - 1
    angle, speed = start[:, 0].clone(), start[:, 1].clone()
    damping, stiffness = 0.3 + 0.2 * start[:, 2], 1.5 + 0.5 * start[:, 3]
    for _ in range(steps):
        speed = speed + dt * (-stiffness * angle.sin() - damping * speed)
        angle = angle + dt * speed
    return start, torch.stack([angle, speed], dim=1)
