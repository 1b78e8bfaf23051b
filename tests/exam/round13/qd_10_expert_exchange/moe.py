import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from exchange import AllToAll, exchange_counts


class Expert(nn.Module):
    def __init__(self, dim, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(dim, 2 * dim, generator=g) / dim**0.5)
        self.down = nn.Parameter(torch.randn(2 * dim, dim, generator=g) / (2 * dim) ** 0.5)

    def forward(self, x):
        return F.silu(x @ self.up) @ self.down


class ExchangeMoE(nn.Module):
    """Top-1 mixture; rank r owns the experts [r * E / world, (r + 1) * E / world)."""

    def __init__(self, dim, experts, layer):
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        self.total, self.per_rank = experts, experts // world
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, experts, bias=False)
        own = range(rank * self.per_rank, (rank + 1) * self.per_rank)
        self.experts = nn.ModuleDict({str(e): Expert(dim, 100 * layer + e) for e in own})

    def forward(self, x):
        h = self.norm(x)
        probs = self.router(h).softmax(-1)
        gate, choice = probs.max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=self.total)
        got = exchange_counts(counts)
        send = counts.view(-1, self.per_rank).sum(1).tolist()
        recv = got.sum(1).tolist()
        rows = AllToAll.apply(h[order], send, recv)
        # rows arrive sorted by source rank, then by expert
        ids = torch.arange(self.per_rank).repeat(got.shape[0]).repeat_interleave(got.flatten())
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts.values()):
            sel = (ids == i).nonzero().squeeze(1)
            out = out.index_add(0, sel, expert(rows[sel]))
        back = AllToAll.apply(out, recv, send)
        y = torch.zeros_like(h).index_copy(0, order, back)
        share = counts.float()
        dist.all_reduce(share)
        aux = self.total * (share / share.sum() * probs.mean(0)).sum()
        return x + gate[:, None] * y, aux


class Policy(nn.Module):
    def __init__(self, obs, dim, actions, experts, layers):
        super().__init__()
        self.inp = nn.Linear(obs, dim)
        self.layers = nn.ModuleList(ExchangeMoE(dim, experts, i) for i in range(layers))
        self.out = nn.Linear(dim, actions)

    def forward(self, obs):
        h, aux = self.inp(obs), 0.0
        for layer in self.layers:
            h, a = layer(h)
            aux = aux + a
        return self.out(h), aux
