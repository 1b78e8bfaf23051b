import copy

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class ResBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, in_dim, dim, depth, out):
        super().__init__()
        self.stem = nn.Linear(in_dim, dim)
        self.blocks = nn.ModuleList(ResBlock(dim) for _ in range(depth))
        self.proj = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, out))

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.proj(x)


def shard(encoder, **kw):
    for b in encoder.blocks:
        fully_shard(b, **kw)
    return fully_shard(encoder, **kw)


def build(in_dim=24, dim=32, depth=2, out=16):
    torch.manual_seed(6)
    student = Encoder(in_dim, dim, depth, out)
    predictor = nn.Sequential(nn.Linear(out, 32), nn.ReLU(), nn.Linear(32, out))
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    shard(student)
    fully_shard(predictor)
    shard(teacher)
    return student, predictor, teacher
