import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    """Top-k experts with sigmoid gates; the load is balanced by a bias on the choice instead of a loss."""

    def __init__(self, dim, hidden, n_expert=8, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, n_expert, bias=False)
        self.w_in = nn.Parameter(torch.randn(n_expert, dim, hidden) * dim ** -0.5)
        self.w_out = nn.Parameter(torch.randn(n_expert, hidden, dim) * hidden ** -0.5)
        self.register_buffer("bias", torch.zeros(n_expert))
        self.register_buffer("load", torch.zeros(n_expert), persistent=False)

    def forward(self, x):
        score = torch.sigmoid(self.gate(x))
        chosen = (score + self.bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(score).scatter_(-1, chosen, 1.0)
        if self.training:
            self.load += mask.detach().sum((0, 1))
        weight = score * mask
        weight = weight / weight.sum(-1, keepdim=True)
        h = F.gelu(torch.einsum("btd,edh->bteh", x, self.w_in))
        y = torch.einsum("bteh,ehd->bted", h, self.w_out)
        return (weight[..., None] * y).sum(2)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.moe = MoE(dim, 2 * dim)

    def forward(self, x):
        x = x + self.mix(self.n1(x))[0]
        return x + self.moe(self.n2(x))


class MoELM(nn.Module):
    def __init__(self, vocab=64, dim=32, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(x)
