import torch
import torch.nn as nn


class TabularNet(nn.Module):
    def __init__(self, numeric=10, cats=(12, 7), width=96, emb=8):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(k, emb) for k in cats)
        d = numeric + emb * len(cats)
        self.first = nn.Linear(d, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x, c):
        h = torch.cat([x] + [e(c[:, i]) for i, e in enumerate(self.emb)], 1)
        h = torch.relu(self.first(h))
        h = h + torch.relu(self.second(h))
        return self.out(h).squeeze(-1)
