import torch
import torch.nn as nn
import torch.nn.functional as F

from documents import VOCAB


class Recurrent(nn.Module):
    """gated linear recurrence, computed with a lower-triangular matrix of decays"""

    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.inp, self.gate, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.decay = nn.Parameter(torch.linspace(-1, 3, d))
        self.ff = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        h = self.norm(x)
        t = torch.arange(x.shape[1])
        distance = (t[:, None] - t[None, :]).clamp(min=0)
        power = F.logsigmoid(self.decay)[:, None, None] * distance
        kernel = power.exp() * (t[:, None] >= t[None, :])
        mixed = torch.einsum("dts,bsd->btd", kernel, self.inp(h))
        x = x + self.out(mixed * torch.sigmoid(self.gate(h)))
        return x + self.ff(x)


class LM(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d)
        self.blocks = nn.ModuleList([Recurrent(d), Recurrent(d)])
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(x)
