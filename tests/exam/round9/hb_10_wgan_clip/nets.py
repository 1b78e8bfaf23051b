import torch.nn as nn


def generator(z=8, h=32, out=48):
    return nn.Sequential(nn.Linear(z, h), nn.LayerNorm(h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, out), nn.Tanh())


def critic(inp=48, h=32):
    return nn.Sequential(nn.Linear(inp, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, 1))
