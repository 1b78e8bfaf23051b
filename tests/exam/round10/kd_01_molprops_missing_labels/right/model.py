import torch
import torch.nn as nn
import torch.nn.functional as F


class MessageBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.msg = nn.Linear(dim, dim)
        self.upd = nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, h, adj):
        m = adj @ F.silu(self.msg(h)) / adj.sum(-1, keepdim=True).clamp(min=1)
        return self.norm(h + F.silu(self.upd(torch.cat([h, m], -1))))


class MolNet(nn.Module):
    def __init__(self, n_types=6, dim=24, depth=3, n_tasks=5):
        super().__init__()
        self.atom = nn.Embedding(n_types, dim)
        self.blocks = nn.ModuleList(MessageBlock(dim) for _ in range(depth))
        self.readout = nn.Linear(dim, n_tasks)

    def forward(self, types, adj):
        h = self.atom(types)
        for b in self.blocks:
            h = b(h, adj)
        return self.readout(h.mean(1))
