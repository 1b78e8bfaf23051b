"""A stochastic block graph with noisy node features; the label of a node is its block."""
import torch

NODES, BLOCKS, FEATS = 240, 4, 10


def make_graph(seed=2):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, BLOCKS, (NODES,), generator=g)
    p = torch.where(y[:, None] == y[None], 0.08, 0.015)
    a = (torch.rand(NODES, NODES, generator=g) < p).float().triu(1)
    a = a + a.T + torch.eye(NODES)
    d = a.sum(1).rsqrt()
    x = torch.randn(NODES, FEATS, generator=g) * 2.0
    x[torch.arange(NODES), y] += 1.5
    order = torch.randperm(NODES, generator=g)
    return d[:, None] * a * d[None], x, y, order[:160], order[160:]


def my_slice(idx, rank, world):
    return idx[: len(idx) // world * world].chunk(world)[rank]
