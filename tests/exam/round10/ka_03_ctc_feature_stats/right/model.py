import torch.nn as nn

from corpus import BINS, PHONES
from features import RunningCMVN


class CTCModel(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.cmvn = RunningCMVN(BINS)
        self.proj = nn.Linear(BINS, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(3)
        )
        self.out = nn.Linear(dim, PHONES + 1)

    def forward(self, feats, lengths):
        if self.training:
            self.cmvn.observe(feats, lengths)
        x = self.proj(self.cmvn(feats))
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x).log_softmax(-1)
