import math

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class ResidualLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.cond = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x, c):
        return x + self.fc2(torch.nn.functional.silu(self.fc1(self.norm(x)) + self.cond(c)))


class Denoiser(nn.Module):
    def __init__(self, data_dim=2, dim=32, depth=3):
        super().__init__()
        self.dim = dim
        self.inp = nn.Linear(data_dim, dim)
        self.layers = nn.ModuleList(ResidualLayer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, data_dim)

    def embed_time(self, t):
        freqs = torch.exp(-math.log(1000.0) * torch.arange(self.dim // 2) / (self.dim // 2))
        angle = t.float().unsqueeze(-1) * freqs
        return torch.cat([angle.sin(), angle.cos()], dim=-1)

    def forward(self, x, t):
        c = self.embed_time(t)
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, c)
        return self.out(x)


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
