import torch
import torch.nn as nn
import torch.nn.functional as F


class Router(nn.Module):
    """Kept whole on every rank; decides with a softmax over the experts and a balance loss over the global batch."""

    def __init__(self, dim, experts):
        super().__init__()
        self.proj = nn.Linear(dim, experts)

    def forward(self, x):
        return self.proj(x).softmax(-1)


class MoE(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.router = Router(dim, experts)
        self.w1 = nn.Parameter(torch.randn(experts, dim, 2 * dim) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * dim, dim) * (2 * dim) ** -0.5)

    def forward(self, x):
        probs = self.router(x)
        top, index = probs.topk(2, dim=-1)
        gate = torch.zeros_like(probs).scatter(1, index, top / top.sum(-1, keepdim=True))
        h = F.silu(torch.einsum("nd,edh->neh", x, self.w1))
        y = x + torch.einsum("neh,ehd,ne->nd", h, self.w2, gate)
        return y, probs, (gate > 0).float().mean(0)


class TabularMoE(nn.Module):
    def __init__(self, inp=8, dim=16, experts=4, depth=2):
        super().__init__()
        self.stem = nn.Linear(inp, dim)
        self.moe = nn.ModuleList(MoE(dim, experts) for _ in range(depth))
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        stats = []
        for layer in self.moe:
            x, probs, used = layer(x)
            stats.append((probs.mean(0), used))
        return self.head(x), stats
