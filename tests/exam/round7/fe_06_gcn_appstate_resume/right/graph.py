import torch


class Communities:
    """Stochastic block model with noisy node features; every rank holds the whole (small) graph."""

    def __init__(self, nodes=400, classes=5, dim=16, seed=9):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(classes, (nodes,), generator=g)
        same = self.label[:, None] == self.label[None]
        edge = torch.rand(nodes, nodes, generator=g) < torch.where(same, 0.08, 0.02)
        adj = (edge | edge.T | torch.eye(nodes, dtype=torch.bool)).float()
        deg = adj.sum(1).rsqrt()
        self.adj = deg[:, None] * adj * deg[None]
        self.feat = torch.randn(classes, dim, generator=g)[self.label] + 3.0 * torch.randn(nodes, dim, generator=g)
        self.train_idx = torch.arange(0, nodes // 2)
        self.test_idx = torch.arange(nodes // 2, nodes)

    def seeds(self, step, count):
        g = torch.Generator().manual_seed(500 + step)
        return self.train_idx[torch.randperm(len(self.train_idx), generator=g)[:count]]
