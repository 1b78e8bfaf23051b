import torch
import torch.nn as nn
import torch.nn.functional as F


class Mixer(nn.Module):
    def __init__(self, dim, length):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.along = nn.Linear(length, length, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        x = x + self.along(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class BindingNet(nn.Module):
    """Binding strength of an antibody loop to a panel of antigens."""

    def __init__(self, dim=24, length=16, depth=2, panel=6):
        super().__init__()
        self.embed = nn.Embedding(20, dim)
        self.blocks = nn.ModuleList(Mixer(dim, length) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(length * dim, panel)

    def forward(self, seq):
        h = self.embed(seq)
        for b in self.blocks:
            h = b(h)
        return self.head(self.norm(h).flatten(1))


def library(n=256, length=16, panel=6, seed=23):
    g = torch.Generator().manual_seed(seed)
    seq = torch.randint(0, 20, (n, length), generator=g)
    contact = torch.randn(length, 20, panel, generator=g) / length ** 0.5
    y = contact[torch.arange(length), seq].sum(1)
    return seq, y + 0.1 * torch.randn(n, panel, generator=g)
