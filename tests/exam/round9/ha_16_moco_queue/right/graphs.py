"""Small random graphs of a few families, with two augmented views of each."""
import torch

NODES, FEATURES, FAMILIES = 10, 8, 5


def graphs(step, n, seed=0):
    g = torch.Generator().manual_seed(seed + 31 * step)
    family = torch.randint(0, FAMILIES, (n,), generator=g)
    distance = (torch.arange(NODES)[:, None] - torch.arange(NODES)[None]).abs()
    p = torch.exp(-distance[None] / (1.0 + family[:, None, None]))
    upper = (torch.rand(n, NODES, NODES, generator=g) < p).float().triu(1)
    x = torch.randn(n, NODES, FEATURES, generator=g) + family[:, None, None] * torch.linspace(-0.4, 0.4, FEATURES)
    return x, upper + upper.transpose(1, 2), family


def augment(x, adj, step, view):
    g = torch.Generator().manual_seed(1_000_003 * view + step)
    keep = (torch.rand(adj.shape, generator=g) > 0.1).float().triu(1)
    masked = (torch.rand(x.shape[:2] + (1,), generator=g) > 0.15).float()
    return x * masked + 0.05 * torch.randn(x.shape, generator=g), adj * (keep + keep.transpose(1, 2))
