import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, DIM = 32, 18, 24


class GruLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, 2 * DIM, batch_first=True)
        self.head = nn.Linear(2 * DIM, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


class ConvLM(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.convs = nn.ModuleList(nn.Conv1d(DIM, DIM, 3, dilation=2 ** i) for i in range(depth))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        for i, conv in enumerate(self.convs):
            x = x + F.gelu(conv(F.pad(x, (2 ** (i + 1), 0))))
        return self.head(self.norm(x.transpose(1, 2)))


class BigramMlp(nn.Module):
    """The small one, for the second phase."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mlp = nn.Sequential(nn.Linear(2 * DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, VOCAB, bias=False))

    def forward(self, ids):
        x = self.embed(ids)
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.mlp(torch.cat([before, x], -1))
