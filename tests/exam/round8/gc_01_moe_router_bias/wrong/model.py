"""A small decoder with mixture-of-experts feed-forwards, balanced by a router bias instead of an auxiliary loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, dim, hidden, n_experts, top_k):
        super().__init__()
        self.n_experts, self.top_k = n_experts, top_k
        self.gate = nn.Linear(dim, n_experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(n_experts, dim, hidden) * dim ** -0.5)
        self.w_out = nn.Parameter(torch.randn(n_experts, hidden, dim) * hidden ** -0.5)
        self.register_buffer("expert_bias", torch.zeros(n_experts))
        self.register_buffer("load", torch.zeros(n_experts), persistent=False)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        scores = torch.sigmoid(self.gate(flat))
        # the bias only decides who is chosen, the mixing weights come from the raw scores
        chosen = torch.topk(scores + self.expert_bias, self.top_k, dim=-1).indices
        weights = torch.gather(scores, 1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        mask = torch.zeros_like(scores).scatter(1, chosen, weights)
        if self.training:
            self.load += F.one_hot(chosen, self.n_experts).sum((0, 1)).float()
        h = F.gelu(torch.einsum("td,edh->teh", flat, self.w_in))
        y = torch.einsum("teh,ehd,te->td", h, self.w_out, mask)
        return y.reshape(x.shape)


class Block(nn.Module):
    def __init__(self, dim, heads, n_experts, top_k):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.moe = MoE(dim, 2 * dim, n_experts, top_k)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.moe(self.norm2(x))


class MoELM(nn.Module):
    def __init__(self, vocab=48, dim=32, heads=4, layers=2, ctx=16, n_experts=8, top_k=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(ctx, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads, n_experts, top_k) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))
