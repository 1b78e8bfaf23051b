import torch
import torch.nn as nn
import torch.nn.functional as F


class MoELayer(nn.Module):
    """Top-k experts with sigmoid gating. `select_bias` only steers which experts are chosen (no auxiliary loss)."""

    def __init__(self, dim, hidden, experts, topk):
        super().__init__()
        self.experts, self.topk = experts, topk
        self.router = nn.Linear(dim, experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.w_out = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)
        self.register_buffer("select_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x, residual):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        score = torch.sigmoid(self.router(x))
        chosen = (score + self.select_bias).topk(self.topk, dim=-1).indices
        mask = torch.zeros_like(score).scatter_(1, chosen, 1.0)
        if self.training:
            self.load += mask.sum(0).detach()
        gate = score * mask
        gate = gate / gate.sum(-1, keepdim=True)
        h = F.gelu(torch.einsum("nd,edh->neh", x, self.w_in))
        y = torch.einsum("neh,ehd,ne->nd", h, self.w_out, gate)
        return residual + y.view(shape)


class MoEModel(nn.Module):
    def __init__(self, vocab=40, dim=24, hidden=32, experts=8, topk=2, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.ModuleList(nn.GRU(dim, dim, batch_first=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.moe = nn.ModuleList(MoELayer(dim, hidden, experts, topk) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for mix, norm, moe in zip(self.mix, self.norms, self.moe):
            x = x + mix(x)[0]
            x = moe(norm(x), x)
        return self.head(x)
