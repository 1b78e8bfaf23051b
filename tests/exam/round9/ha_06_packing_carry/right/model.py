import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedConvBlock(nn.Module):
    def __init__(self, dim, kernel):
        super().__init__()
        self.kernel = kernel
        self.norm = nn.RMSNorm(dim)
        self.inp = nn.Linear(dim, 2 * dim)
        self.conv = nn.Conv1d(dim, dim, kernel, groups=dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        u, gate = self.inp(self.norm(x)).chunk(2, -1)
        u = self.conv(F.pad(u.transpose(1, 2), (self.kernel - 1, 0))).transpose(1, 2)
        return x + self.out(u * F.silu(gate))


class ConvLM(nn.Module):
    def __init__(self, vocab, dim=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(GatedConvBlock(dim, 4) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
