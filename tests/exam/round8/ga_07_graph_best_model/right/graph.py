import torch

NODES, CLASSES, FEATS = 160, 4, 20


def make_graph(seed=3):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (NODES,), generator=g)
    same = y[:, None] == y[None]
    p = torch.where(same, 0.07, 0.025)
    a = (torch.rand(NODES, NODES, generator=g) < p).triu(1)
    a = (a | a.t()).float() + torch.eye(NODES)
    d = a.sum(1).rsqrt()
    x = torch.randn(CLASSES, FEATS, generator=g)[y] * 0.45 + torch.randn(NODES, FEATS, generator=g)
    order = torch.randperm(NODES, generator=g)
    return d[:, None] * a * d[None], x, y, order[:96], order[96:128], order[128:]
