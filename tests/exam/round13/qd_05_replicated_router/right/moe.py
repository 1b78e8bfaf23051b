import torch
import torch.nn as nn
import torch.nn.functional as F


class Router(nn.Module):
    """Gate with a learned temperature per expert; runs in full precision on whole weights."""

    def __init__(self, dim, experts):
        super().__init__()
        self.proj = nn.Linear(dim, experts)
        self.log_temp = nn.Parameter(torch.zeros(experts))

    def forward(self, x):
        return (self.proj(x) * self.log_temp.exp()).softmax(-1)


class SoftMoEBlock(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = Router(dim, experts)
        self.w1 = nn.Parameter(torch.randn(experts, dim, dim) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, dim, dim) / dim**0.5)

    def forward(self, x):
        h = self.norm(x)
        gate = self.router(h)
        z = F.gelu(torch.einsum("bd,edf->bef", h, self.w1))
        return x + torch.einsum("bef,efd,be->bd", z, self.w2, gate)


class MultiSkill(nn.Module):
    def __init__(self, obs, dim, act, experts, depth):
        super().__init__()
        self.inp = nn.Linear(obs, dim)
        self.blocks = nn.ModuleList(SoftMoEBlock(dim, experts) for _ in range(depth))
        self.out = nn.Linear(dim, act)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x)
