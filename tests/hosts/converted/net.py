"""A small decoder with rotary positions and tied embeddings, and made-up sequences of different lengths."""

import torch
import torch.nn.functional as F
from torch import nn

PAD, VOCAB, SEQ, WIDTH, HEADS, LAYERS = -100, 48, 24, 32, 4, 2


def rope_table():
    """[sequence, head size / 2] angles."""
    half = WIDTH // HEADS // 2
    return torch.outer(torch.arange(SEQ), 100.0 ** (-torch.arange(half) / half))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, angles):
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(turn(q, angles), turn(k, angles), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, WIDTH))
        return x + self.mlp(self.norm2(x))


def turn(x, angles):
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("angles", rope_table(), persistent=False)

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(self.norm(x))


def batch_of(first, size):
    """Samples `first` to `first + size` of the stream: inputs and targets [size, SEQ]."""
    rows = []
    for number in range(first, first + size):
        gen = torch.Generator().manual_seed(number)
        start, stride, length = torch.randint(1, 1000, (3,), generator=gen).tolist()
        row = (start + (1 + stride % 5) * torch.arange(SEQ + 1)) % VOCAB
        target = row[1:].clone()
        target[6 + length % (SEQ - 6) :] = PAD
        rows.append((row[:-1], target))
    inputs, targets = zip(*rows, strict=True)
    return torch.stack(inputs), torch.stack(targets)
