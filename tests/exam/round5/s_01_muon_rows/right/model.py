import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, vocab=32, d=24, depth=2, ctx=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.mix = nn.Linear(ctx * d, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Linear(d, vocab)

    def forward(self, tokens):
        x = self.mix(self.emb(tokens).flatten(1))
        for b in self.blocks:
            x = b(x)
        return self.head(x)
