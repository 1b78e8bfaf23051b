import torch
import torch.nn as nn

from experts import ExpertParallelMoE


class Layer(nn.Module):
    def __init__(self, dim, heads, n_experts):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.moe = ExpertParallelMoE(dim, 2 * dim, n_experts)

    def forward(self, x):
        h = self.norm1(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        y, routing = self.moe(self.norm2(x))
        return x + y, routing


class ExpertLM(nn.Module):
    def __init__(self, vocab, length, dim=24, heads=2, depth=2, n_experts=4):
        super().__init__()
        self.n_experts = n_experts
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(length, dim))
        self.layers = nn.ModuleList(Layer(dim, heads, n_experts) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.pos
        routings = []
        for layer in self.layers:
            x, routing = layer(x)
            routings.append(routing)
        return self.head(self.norm(x)), routings

    def expert_parameters(self):
        return [p for layer in self.layers for p in layer.moe.expert_parameters()]
