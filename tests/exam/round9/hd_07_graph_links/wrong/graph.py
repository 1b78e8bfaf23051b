import torch


def build_graph(nodes=150, seed=8):
    """Heavy-tailed popularity: the first nodes have most of the links."""
    g = torch.Generator().manual_seed(seed)
    place = torch.rand(nodes, 2, generator=g)
    popularity = 1 / (1 + torch.arange(nodes).float()) ** 0.5
    near = torch.exp(-torch.cdist(place, place) * 6) * popularity[:, None] * popularity[None] * 12
    upper = torch.triu(torch.rand(nodes, nodes, generator=g) < near, 1)
    edges = upper.nonzero()
    edges = edges[torch.randperm(len(edges), generator=g)]
    cut = int(0.8 * len(edges))
    adj = torch.zeros(nodes, nodes)
    adj[edges[:cut, 0], edges[:cut, 1]] = 1
    adj = adj + adj.T
    d = adj.sum(1).clamp(min=1).rsqrt()
    return d[:, None] * adj * d[None], edges[:cut], edges[cut:]


def batch(edges, nodes, size, step, seed=0):
    """Half real links, half random pairs."""
    g = torch.Generator().manual_seed(seed * 7919 + step)
    pos = edges[torch.randint(0, len(edges), (size // 2,), generator=g)]
    neg = torch.randint(0, nodes, (size // 2, 2), generator=g)
    pairs = torch.stack([pos, neg], 1).flatten(0, 1)
    labels = torch.tensor([1.0, 0.0]).repeat(size // 2)
    return pairs, labels
