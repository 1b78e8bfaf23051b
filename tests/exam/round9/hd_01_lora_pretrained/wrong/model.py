import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, in_features, out_features, rank=0, alpha=8.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.xavier_uniform_(self.weight)
        self.rank = rank
        if rank:
            self.lora_A = nn.Parameter(torch.randn(rank, in_features) / in_features**0.5)
            self.lora_B = nn.Parameter(torch.zeros(out_features, rank))
            self.scale = alpha / rank

    def forward(self, x):
        y = F.linear(x, self.weight)
        if self.rank:
            y = y + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale
        return y


class Block(nn.Module):
    def __init__(self, dim, heads, rank):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = LoRALinear(dim, 3 * dim, rank)
        self.proj = LoRALinear(dim, dim)
        self.up = LoRALinear(dim, 2 * dim, rank)
        self.down = LoRALinear(2 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyLM(nn.Module):
    def __init__(self, vocab=32, dim=32, heads=2, layers=2, rank=0):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(32, dim) * 0.1)
        self.blocks = nn.ModuleList(Block(dim, heads, rank) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = LoRALinear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
