"""Toy protein language model and sequences of a family with conserved motifs."""
import torch
from torch import nn
import torch.nn.functional as F

from lora import LoRALinear

AA, LENGTH = 20, 24


class Block(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = LoRALinear(d, 3 * d)
        self.proj = LoRALinear(d, d)
        self.up, self.down = LoRALinear(d, 2 * d), LoRALinear(2 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class ProteinLM(nn.Module):
    def __init__(self, d=32, depth=2):
        super().__init__()
        self.tok = nn.Embedding(AA, d)
        self.pos = nn.Embedding(LENGTH, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, AA, bias=False)
        for m in (self.tok, self.pos, self.head):
            m.requires_grad_(False)

    def forward(self, seq):
        h = self.tok(seq) + self.pos.weight[:seq.shape[1]]
        for b in self.blocks:
            h = b(h)
        return self.head(self.norm(h))


def family(n, seed):
    g = torch.Generator().manual_seed(2)
    consensus = torch.randint(0, AA, (3, LENGTH), generator=g)
    g.manual_seed(seed)
    seq = consensus[torch.randint(0, 3, (n,), generator=g)]
    mutated = torch.rand(seq.shape, generator=g) < 0.15
    return torch.where(mutated, torch.randint(0, AA, seq.shape, generator=g), seq)


def lm_loss(model, seq):
    logits = model(seq[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten())
