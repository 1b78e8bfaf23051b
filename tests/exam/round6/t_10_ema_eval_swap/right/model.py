import torch
import torch.nn as nn
import torch.nn.functional as F


class RetentionBlock(nn.Module):
    """Linear attention with a fixed decay per head."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkvg = nn.Linear(dim, 4 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v, g = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkvg(self.norm(x)).chunk(4, dim=-1))
        pos = torch.arange(t)
        lag = (pos[:, None] - pos[None, :]).clamp(min=0)
        decay = torch.tensor([0.5, 0.75, 0.9, 1.0])[:, None, None]
        mask = torch.where(pos[:, None] >= pos[None, :], decay**lag, torch.zeros(()))
        y = (q @ k.transpose(-1, -2) * mask / q.shape[-1] ** 0.5) @ v
        y = y * F.silu(g)
        return x + self.out(y.transpose(1, 2).reshape(b, t, d))


class RetLM(nn.Module):
    def __init__(self, vocab=48, dim=48, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(RetentionBlock(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        for b in self.blocks:
            h = b(h)
        return self.head(self.norm(h))
