import torch
import torch.nn as nn

from codebook import EMACodebook


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.a = nn.Linear(dim, 2 * dim)
        self.b = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.norm(x))))


class PatchVQ(nn.Module):
    """Autoencoder of image patches with one code per patch."""

    def __init__(self, patch=16, dim=32, latent=4, codes=24):
        super().__init__()
        self.enc = nn.ModuleList([nn.Linear(patch, dim), Block(dim), nn.Linear(dim, latent)])
        self.book = EMACodebook(codes, latent)
        self.dec = nn.ModuleList([nn.Linear(latent, dim), Block(dim), nn.Linear(dim, patch)])

    def forward(self, x):
        z = x
        for m in self.enc:
            z = m(z)
        q, index, commit = self.book(z)
        for m in self.dec:
            q = m(q)
        return q, z.detach(), index, commit
