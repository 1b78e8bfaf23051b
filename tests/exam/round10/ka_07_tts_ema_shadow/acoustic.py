import torch
import torch.nn as nn

PHONES, BINS, LENGTH = 24, 20, 16


class AcousticModel(nn.Module):
    """Phones to mel frames, one frame per phone."""

    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(PHONES, dim)
        self.layers = nn.ModuleList(nn.GRU(dim, dim // 2, batch_first=True, bidirectional=True) for _ in range(2))
        self.mel = nn.Linear(dim, BINS)

    def forward(self, phones):
        x = self.embed(phones)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.mel(x)


_table = torch.randn(PHONES, BINS, generator=torch.Generator().manual_seed(1))


def sentences(seed, n):
    g = torch.Generator().manual_seed(seed)
    phones = torch.randint(0, PHONES, (n, LENGTH), generator=g)
    left = _table[phones.roll(1, 1)]
    mel = _table[phones] + 0.5 * left + 0.5 * torch.randn(n, LENGTH, BINS, generator=g)
    return phones, mel
