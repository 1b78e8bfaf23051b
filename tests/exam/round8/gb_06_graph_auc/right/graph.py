import torch


class SyntheticGraph:
    """Stochastic block model with noisy node features."""

    def __init__(self, n=120, blocks=4, feats=12, seed=13):
        g = torch.Generator().manual_seed(seed)
        self.n = n
        label = torch.arange(n) % blocks
        self.x = torch.randn(blocks, feats, generator=g)[label] + 1.2 * torch.randn(n, feats, generator=g)
        same = label[:, None] == label[None, :]
        p = torch.where(same, 0.30, 0.03)
        upper = torch.triu(torch.rand(n, n, generator=g) < p, diagonal=1)
        edges = upper.nonzero()
        edges = edges[torch.randperm(len(edges), generator=g)]
        cut = int(0.8 * len(edges))
        self.train_edges, self.test_edges = edges[:cut], edges[cut:]
        self.known = upper | upper.t()
        adj = torch.zeros(n, n)
        adj[self.train_edges[:, 0], self.train_edges[:, 1]] = 1
        adj = adj + adj.t() + torch.eye(n)
        d = adj.sum(1).rsqrt()
        self.adj = d[:, None] * adj * d[None, :]

    def non_edges(self, k, g):
        out = torch.empty(0, 2, dtype=torch.long)
        while len(out) < k:
            c = torch.randint(self.n, (4 * k, 2), generator=g)
            keep = ~self.known[c[:, 0], c[:, 1]] & (c[:, 0] != c[:, 1])
            out = torch.cat([out, c[keep]])
        return out[:k]
