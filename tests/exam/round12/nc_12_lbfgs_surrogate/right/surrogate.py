import torch
from torch import nn


def airfoil_table(n=128):
    """drag-like response on a low-discrepancy design"""
    k = torch.arange(1, n + 1, dtype=torch.float64)[:, None]
    x = (k * torch.tensor([0.754877666, 0.569840296, 0.438], dtype=torch.float64)) % 1.0
    angle, speed, chord = (2 * x - 1).t()
    y = 0.5 * angle**2 + 0.3 * torch.sin(3 * angle) * speed + 0.2 * torch.exp(-4 * chord**2)
    return 2 * x - 1, y[:, None]


def network(width=16):
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).double()
