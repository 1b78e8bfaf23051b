import torch
import torch.nn as nn
import torch.nn.functional as F

from fused_kd import ChunkedKD


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.n2(x))))


class Trunk(nn.Module):
    def __init__(self, vocab, d, depth, context, heads):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(d)
        self.vocab_matrix = nn.Parameter(torch.randn(vocab, d) * d**-0.5)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for b in self.blocks:
            x = b(x)
        return self.norm(x)


class Teacher(Trunk):
    def forward(self, ids):
        return 2.0 * F.linear(super().forward(ids), self.vocab_matrix)


class Student(Trunk):
    """Returns the loss, not logits: the vocabulary matrix is whole only while forward runs."""

    def forward(self, ids, teacher_logits, keep, temperature, chunk=10):
        h = super().forward(ids)
        return ChunkedKD.apply(
            h.flatten(0, 1), self.vocab_matrix, teacher_logits.flatten(0, 1), keep.flatten(), temperature, chunk
        )
