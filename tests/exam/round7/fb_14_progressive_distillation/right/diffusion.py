import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class XPredictor(nn.Module):
    """Predicts the clean signal from a noisy one and the time in [0, 1]."""

    def __init__(self, dim=12, width=40):
        super().__init__()
        self.inp = nn.Linear(dim + 8, width)
        self.mid = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.out = nn.Linear(width, dim)

    def forward(self, x, t):
        f = t[:, None] * (2.0 ** torch.arange(4)) * math.pi
        h = F.silu(self.inp(torch.cat([x, f.sin(), f.cos()], -1)))
        for layer in self.mid:
            h = h + F.silu(layer(h))
        return self.out(h)


def alpha_sigma(t):
    return torch.cos(0.5 * math.pi * t)[:, None], torch.sin(0.5 * math.pi * t)[:, None]


def ddim(model, z, t, s):
    """One deterministic step from time t to time s < t."""
    a_t, s_t = alpha_sigma(t)
    a_s, s_s = alpha_sigma(s)
    x = model(z, t)
    eps = (z - a_t * x) / s_t
    return a_s * x + s_s * eps


@torch.no_grad()
def teacher_target(teacher, z, t, steps):
    """The x that takes the student in one step of 1/steps where the teacher arrives in two."""
    mid, end = t - 0.5 / steps, t - 1.0 / steps
    z_end = ddim(teacher, ddim(teacher, z, t, mid), mid, end)
    a_t, s_t = alpha_sigma(t)
    a_e, s_e = alpha_sigma(end)
    ratio = s_e / s_t
    return (z_end - ratio * z) / (a_e - ratio * a_t)
