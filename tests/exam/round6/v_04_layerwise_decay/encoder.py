import torch
import torch.nn as nn
import torch.nn.functional as F


class EncoderBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1)
        self.mlp = nn.Linear(dim, dim)

    def forward(self, x):
        y = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(F.gelu(y))


class TimeSeriesEncoder(nn.Module):
    def __init__(self, channels=3, dim=24, depth=4):
        super().__init__()
        self.stem = nn.Linear(channels, dim)
        self.blocks = nn.ModuleList(EncoderBlock(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1)).sum(-1)


def layers_by_depth(model):
    """Stem first, head last."""
    return [model.stem, *model.blocks, model.head]
