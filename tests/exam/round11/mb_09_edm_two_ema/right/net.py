import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, ch, emb):
        super().__init__()
        self.c1 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.c2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.mod = nn.Linear(emb, ch, bias=False)
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, x, e):
        h = F.silu(self.c1(x)) * (1 + self.gain * self.mod(e))[:, :, None, None]
        return (x + 0.5 * self.c2(h)) / math.sqrt(1.25)


class EDMNet(nn.Module):
    """Magnitude-preserving toy network with the preconditioning of EDM."""

    def __init__(self, ch=20, emb=24, depth=3, sigma_data=0.6):
        super().__init__()
        self.sigma_data = sigma_data
        self.register_buffer("freqs", torch.randn(emb))
        self.inp = nn.Conv2d(2, ch, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList([Block(ch, emb) for _ in range(depth)])
        self.out = nn.Conv2d(ch, 1, 1, bias=False)
        self.out_gain = nn.Parameter(torch.full((1,), 0.2))

    def forward(self, x, sigma):
        s = sigma.view(-1, 1, 1, 1)
        d = self.sigma_data
        c_skip = d * d / (s * s + d * d)
        c_out = s * d / (s * s + d * d).sqrt()
        c_in = 1 / (s * s + d * d).sqrt()
        e = torch.cos(sigma.log().view(-1, 1) / 4 * self.freqs * 2 * math.pi) * math.sqrt(2)
        h = x * c_in
        h = self.inp(torch.cat([h, torch.ones_like(h)], 1))
        for b in self.blocks:
            h = b(h, e)
        return c_skip * x + c_out * self.out_gain * self.out(h)


@torch.no_grad()
def normalize_weights(model):
    """Forced weight normalisation: every output unit is put back on its sphere. The units are the rows of dim 0,
    over which the parameters are sharded, so a rank can treat its own rows."""
    for p in model.parameters():
        if p.ndim < 2:
            continue
        w = p.to_local() if hasattr(p, "to_local") else p
        if w.numel():
            n = w.flatten(1).norm(dim=1).view(-1, *[1] * (w.ndim - 1))
            w.div_(n + 1e-4)
