import torch.nn as nn

from vq import Quantizer


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o))


class VQVAE(nn.Module):
    def __init__(self, dim=16, hidden=32, code=8):
        super().__init__()
        self.enc = mlp(dim, hidden, code)
        self.norm = nn.LayerNorm(code)
        self.vq = Quantizer(dim=code)
        self.dec = mlp(code, hidden, dim)

    def forward(self, x):
        q, commit, idx = self.vq(self.norm(self.enc(x)))
        return self.dec(q), commit, idx
