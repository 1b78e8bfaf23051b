import torch
import torch.nn as nn
import torch.nn.functional as F

from lora import LoRALinear


class Block(nn.Module):
    def __init__(self, dim, heads, rank, alpha):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q = LoRALinear(dim, dim, rank, alpha)
        self.k = LoRALinear(dim, dim, rank, alpha)
        self.v = LoRALinear(dim, dim, rank, alpha)
        self.o = nn.Linear(dim, dim, bias=False)
        self.up = LoRALinear(dim, 2 * dim, rank, alpha)
        self.down = LoRALinear(2 * dim, dim, rank, alpha)

    def forward(self, x):
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ChatModel(nn.Module):
    def __init__(self, vocab, dim, depth, max_len, rank=4, alpha=8.0):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(max_len, dim) * 0.3)
        self.blocks = nn.ModuleList(Block(dim, 4, rank, alpha) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = LoRALinear(dim, vocab, rank, alpha)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
