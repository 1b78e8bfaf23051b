import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MoE(nn.Module):
    """Top-k experts. Balance is kept by a selection bias rather than by an auxiliary loss."""

    def __init__(self, dim, hidden, n_experts=6, k=2, rate=0.05):
        super().__init__()
        self.k, self.rate, self.n = k, rate, n_experts
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(n_experts))
        self.register_buffer("bias", torch.zeros(n_experts))
        self.register_buffer("tokens", torch.zeros(n_experts), persistent=False)

    def forward(self, x):
        score = torch.sigmoid(self.router(x))
        chosen = (score.detach() + self.bias).topk(self.k, dim=-1).indices
        gate = torch.zeros_like(score).scatter(-1, chosen, score.gather(-1, chosen))
        gate = gate / gate.sum(-1, keepdim=True)
        if self.training:
            self.tokens += torch.bincount(chosen.flatten(), minlength=self.n)
        return sum(gate[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))

    @torch.no_grad()
    def rebalance(self):
        load = self.tokens.clone()
        dist.all_reduce(load)
        self.tokens.zero_()
        self.bias += self.rate * torch.sign(load.mean() - load)
        return load


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.moe = MoE(dim, 2 * dim)

    def forward(self, x):
        return x + self.moe(self.norm(x))


class MoENet(nn.Module):
    def __init__(self, d_in, d_out, dim=16, depth=2):
        super().__init__()
        self.inp = nn.Linear(d_in, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, d_out)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x)

    def rebalance(self):
        return [b.moe.rebalance() for b in self.blocks]
