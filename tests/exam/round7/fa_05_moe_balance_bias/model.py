import torch
import torch.nn as nn

from moe import MoE


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Conv1d(dim, dim, kernel_size=3)
        self.norm2 = nn.LayerNorm(dim)
        self.moe = MoE(dim, dim)

    def forward(self, x):
        h = nn.functional.pad(self.norm(x).transpose(1, 2), (2, 0))
        x = x + torch.tanh(self.mix(h)).transpose(1, 2)
        return x + self.moe(self.norm2(x).flatten(0, 1)).view_as(x)


class ConvMoELM(nn.Module):
    def __init__(self, vocab=40, dim=24, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def moes(self):
        return [layer.moe for layer in self.layers]
