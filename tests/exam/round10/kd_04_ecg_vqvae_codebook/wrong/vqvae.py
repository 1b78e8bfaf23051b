import torch
import torch.nn as nn
import torch.nn.functional as F

from codebook import EMACodebook


class MLP(nn.Module):
    def __init__(self, n_in, hidden, n_out):
        super().__init__()
        self.a, self.b, self.skip = nn.Linear(n_in, hidden), nn.Linear(hidden, n_out), nn.Linear(n_in, n_out)

    def forward(self, x):
        return self.skip(x) + self.b(F.silu(self.a(x)))


class VQVAE(nn.Module):
    """Patches of a beat are coded one by one; the decoder knows their place in the beat."""

    def __init__(self, length=64, patch=8, width=32, dim=8, n_codes=24):
        super().__init__()
        self.patch = patch
        self.enc = nn.ModuleList([MLP(patch, width, width), MLP(width, width, dim)])
        self.vq = EMACodebook(n_codes, dim)
        self.place = nn.Parameter(torch.zeros(length // patch, dim))
        self.dec = nn.ModuleList([MLP(dim, width, width), MLP(width, width, patch)])

    def encode(self, x):
        h = x.unflatten(-1, (-1, self.patch))
        for b in self.enc:
            h = b(h)
        return h

    def forward(self, x):
        z, commit, idx = self.vq(self.encode(x))
        h = z + self.place
        for b in self.dec:
            h = b(h)
        return torch.cat(h.unbind(1), 1), commit, idx
