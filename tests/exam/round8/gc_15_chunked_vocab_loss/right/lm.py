import torch
import torch.nn as nn
import torch.nn.functional as F

from linear_ce import ChunkedLinearCE


class ConvBlock(nn.Module):
    """Gated causal convolution, then a feed-forward."""

    def __init__(self, d, width=5):
        super().__init__()
        self.width = width
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.conv, self.mix = nn.Conv1d(d, 2 * d, width), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        h = F.pad(self.n1(x).transpose(1, 2), (self.width - 1, 0))
        x = x + self.mix(F.glu(self.conv(h), 1).transpose(1, 2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class TiedLM(nn.Module):
    """The output uses the weights of the embedding. forward returns the sum of the token losses, not a mean."""

    def __init__(self, vocab=50, d=32, depth=2, chunk=37, z_weight=1e-3):
        super().__init__()
        self.chunk, self.z_weight = chunk, z_weight
        self.emb = nn.Embedding(vocab, d)
        nn.init.normal_(self.emb.weight, std=d ** -0.5)
        self.blocks = nn.ModuleList(ConvBlock(d) for _ in range(depth))
        self.norm = nn.LayerNorm(d)

    def forward(self, ids, target):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return ChunkedLinearCE.apply(self.norm(x).flatten(0, 1), self.emb.weight, target.flatten(), self.chunk, self.z_weight)
