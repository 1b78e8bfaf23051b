import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class SageLayer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.own, self.around = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, adj, x):
        return self.own(x) + self.around(adj @ x)


class LinkModel(nn.Module):
    def __init__(self, feats=6, d=32):
        super().__init__()
        self.l1, self.l2 = SageLayer(feats, d), SageLayer(d, d)
        self.pair = nn.Sequential(nn.Linear(2 * d, d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, adj, x, pairs):
        h = self.l2(adj, self.l1(adj, x).relu())
        a, b = h[pairs[:, 0]], h[pairs[:, 1]]
        return self.pair(torch.cat([a * b, (a - b).abs()], 1)).squeeze(1)


def create(seed=0):
    torch.manual_seed(seed)
    m = LinkModel()
    for part in (m.l1, m.l2, m.pair):
        fully_shard(part)
    return fully_shard(m)
