import torch
from torch import nn


class Expert(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.up = nn.Linear(d, hidden)
        self.down = nn.Linear(hidden, d)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


class SoftMoE(nn.Module):
    """Dense mixture: all experts see every row, the gate weighs them."""

    def __init__(self, d, n_experts=4, hidden=32):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.gate = nn.Linear(d, n_experts)
        self.experts = nn.ModuleList(Expert(d, hidden) for _ in range(n_experts))

    def forward(self, x):
        h = self.norm(x)
        w = self.gate(h).softmax(-1)
        y = torch.stack([e(h) for e in self.experts], -1)
        return x + (y * w[:, None, :]).sum(-1)


class TabularMoE(nn.Module):
    def __init__(self, n_num, cardinalities, d=32, layers=2):
        super().__init__()
        self.num = nn.Linear(n_num, d)
        self.cat = nn.ModuleList(nn.Embedding(c, d) for c in cardinalities)
        self.layers = nn.ModuleList(SoftMoE(d) for _ in range(layers))
        self.head = nn.Linear(d, 1)

    def forward(self, num, cat):
        h = self.num(num) + sum(e(cat[:, i]) for i, e in enumerate(self.cat))
        for layer in self.layers:
            h = layer(h)
        return self.head(h)
