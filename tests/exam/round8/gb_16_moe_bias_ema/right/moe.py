import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class BalancedMoE(nn.Module):
    """Top-k mixture of experts, balanced by a routing bias instead of an auxiliary loss (Wang et al. 2024).

    The bias changes only the choice of experts, not the gates. `adjust` moves it after each optimizer step by the
    load that all ranks have counted since the last call.
    """

    def __init__(self, dim, hidden, experts=6, k=2, rate=0.01):
        super().__init__()
        self.k, self.rate = k, rate
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) / dim ** 0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) / hidden ** 0.5)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x, mask):
        scores = torch.sigmoid(self.router(x))
        chosen = (scores + self.bias).topk(self.k, dim=-1).indices
        gate = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        gate = gate / gate.sum(-1, keepdim=True)
        if self.training:
            used = F.one_hot(chosen, scores.shape[-1]).sum(-2) * mask[..., None]
            self.load += used.sum(dim=(0, 1))
        h = torch.einsum("btd,edh->bteh", x, self.w1)
        out = torch.einsum("bteh,ehd->bted", F.silu(h), self.w2)
        return (gate[..., None] * out).sum(2)

    @torch.no_grad()
    def adjust(self):
        dist.all_reduce(self.load)
        self.bias -= self.rate * torch.sign(self.load - self.load.mean())
        worst = (self.load.max() / self.load.mean()).item()
        self.load.zero_()
        return worst


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, dim, 3)
        self.moe = BalancedMoE(dim, 2 * dim)

    def forward(self, x, mask):
        h = F.pad(self.norm(x).transpose(1, 2), (2, 0))
        x = x + self.conv(h).transpose(1, 2)
        return x + self.moe(x, mask)


class MoELM(nn.Module):
    def __init__(self, vocab=32, dim=24, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, mask):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)
