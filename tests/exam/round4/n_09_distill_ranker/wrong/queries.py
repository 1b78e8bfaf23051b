import torch


def make_queries(n, docs=8, feats=12, seed=1):
    """Each query has a handful of documents with features; relevance is a nonlinear function of them."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(feats, 3, generator=torch.Generator().manual_seed(99))
    x = torch.randn(n, docs, feats, generator=g)
    z = x @ w
    return x, torch.tanh(z[..., 0]) + 0.5 * z[..., 1] * torch.sigmoid(z[..., 2])
