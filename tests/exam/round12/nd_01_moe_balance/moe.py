import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class MoELayer(nn.Module):
    """Top-k experts, balanced by a bias on the routing scores (no auxiliary loss)."""

    def __init__(self, dim, hidden, experts, topk):
        super().__init__()
        self.topk, self.experts = topk, experts
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) / dim ** 0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) / hidden ** 0.5)
        self.register_buffer("route_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x):
        score = torch.sigmoid(self.router(x))
        _, top = (score + self.route_bias).topk(self.topk, dim=-1)
        keep = torch.zeros_like(score).scatter_(-1, top, 1.0)
        if self.training:
            self.load += keep.detach().sum(0)
        gate = score * keep
        gate = gate / gate.sum(-1, keepdim=True)
        h = F.silu(torch.einsum("nd,edh->neh", x, self.up))
        return x + torch.einsum("neh,ehd,ne->nd", h, self.down, gate)

    @torch.no_grad()
    def rebalance(self, rate):
        dist.all_reduce(self.load)
        self.route_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class MoEPolicy(nn.Module):
    def __init__(self, obs_dim=12, act_dim=4, dim=16, hidden=32, layers=2, experts=6, topk=2):
        super().__init__()
        self.embed = nn.Linear(obs_dim, dim)
        self.layers = nn.ModuleList(MoELayer(dim, hidden, experts, topk) for _ in range(layers))
        self.head = nn.Linear(dim, act_dim)

    def forward(self, obs):
        x = self.embed(obs)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
