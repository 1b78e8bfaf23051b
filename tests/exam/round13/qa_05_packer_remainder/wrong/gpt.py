import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.n = heads, nn.LayerNorm(dim)
        self.wide = nn.Linear(dim, 5 * dim, bias=False)
        self.narrow = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x):
        """Attention and MLP in parallel, from one norm."""
        d = x.shape[-1]
        qkv, mlp = self.wide(self.n(x)).split([3 * d, 2 * d], -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.linear(a, self.narrow.weight[:, :d]) + F.linear(F.gelu(mlp), self.narrow.weight[:, d:])


class GPT(nn.Module):
    def __init__(self, vocab, length, dim=32, depth=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))
