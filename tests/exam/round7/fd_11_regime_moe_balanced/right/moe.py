"""Top-2 mixture of experts with a selection bias that keeps the load even (no gradient goes through the bias)."""
import torch
import torch.distributed as dist
from torch import nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.w1 = nn.Linear(d, hidden)
        self.w2 = nn.Linear(hidden, d)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class BalancedMoE(nn.Module):
    def __init__(self, d, n_experts=4, k=2, hidden=24):
        super().__init__()
        self.k = k
        self.norm = nn.LayerNorm(d)
        self.router = nn.Linear(d, n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(d, hidden) for _ in range(n_experts))
        self.register_buffer("select_bias", torch.zeros(n_experts))
        self.register_buffer("load", torch.zeros(n_experts), persistent=False)
        self.aux = None

    def forward(self, x):
        shape = x.shape
        h = self.norm(x).flatten(0, -2)
        prob = self.router(h).softmax(-1)
        chosen = (prob.detach() + self.select_bias).topk(self.k, -1).indices
        mask = torch.zeros_like(prob).scatter_(1, chosen, 1.0)
        gate = prob * mask
        gate = gate / gate.sum(-1, keepdim=True)

        # every expert runs on every rank, be it on zero tokens: its all-gather needs all ranks
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            idx = mask[:, e].nonzero().squeeze(-1)
            out = out.index_add(0, idx, expert(h[idx]) * gate[idx, e, None])

        if self.training:
            count = mask.sum(0)
            dist.all_reduce(count)
            self.load += count
            share = count / count.sum()
            # share is global; the mean probability is local, and the mean over ranks of the product is the global one
            self.aux = len(self.experts) * (share * prob.mean(0)).sum()
        return x + out.view(shape)

    @torch.no_grad()
    def adjust_bias(self, rate):
        self.select_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class RegimeModel(nn.Module):
    def __init__(self, lags=8, d=24, depth=2):
        super().__init__()
        self.inp = nn.Linear(lags, d)
        self.layers = nn.ModuleList(BalancedMoE(d) for _ in range(depth))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(h.flatten(0, 1))
