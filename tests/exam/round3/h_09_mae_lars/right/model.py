import torch
import torch.nn as nn
import torch.nn.functional as F


class Mixer(nn.Module):
    def __init__(self, tokens, d):
        super().__init__()
        self.n1, self.tok = nn.LayerNorm(d), nn.Linear(tokens, tokens)
        self.n2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class MaskedAutoencoder(nn.Module):
    def __init__(self, tokens=16, patch=4, d=24, depth=2):
        super().__init__()
        self.inp = nn.Linear(patch, d)
        self.mask_token = nn.Parameter(0.02 * torch.randn(d))
        self.pos = nn.Parameter(0.02 * torch.randn(tokens, d))
        self.blocks = nn.ModuleList(Mixer(tokens, d) for _ in range(depth))
        self.out = nn.Linear(d, patch)

    def forward(self, x, mask):
        h = torch.where(mask[..., None], self.mask_token, self.inp(x)) + self.pos
        for b in self.blocks:
            h = b(h)
        err = (self.out(h) - x).square().mean(-1)
        return (err * mask).sum() / mask.sum()
