import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(dim * 3 // 2, dim, bias=False)

    def forward(self, x):
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class MelFlow(nn.Module):
    """Velocity field for mel frames, conditioned on a phoneme id."""

    def __init__(self, mels=12, dim=24, phonemes=6, depth=2):
        super().__init__()
        self.phoneme = nn.Embedding(phonemes, dim)
        self.time = nn.Linear(1, dim)
        self.inp = nn.Linear(mels, dim)
        self.layers = nn.ModuleList([GatedLayer(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, mels)

    def forward(self, x, t, ids):
        h = self.inp(x) + self.phoneme(ids) + torch.sin(self.time(t[:, None] * 6.0))
        for layer in self.layers:
            h = layer(h)
        return self.out(h)


def split_params(model):
    """Matrices of the hidden layers for Muon, all else for Lion."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("layers.")]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in chosen]
