import torch

DOCS, FEATURES = 12, 10


def make_queries(count, seed, noise):
    """count queries with DOCS documents each: features and graded labels 0..4."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, DOCS, FEATURES, generator=g)
    score = x[..., 0] + 0.7 * x[..., 1] * x[..., 2] + 0.5 * torch.sin(2 * x[..., 3])
    score = score + noise * torch.randn(count, DOCS, generator=g)
    cuts = torch.tensor([-0.5, 0.4, 1.2, 2.0])
    return x, torch.bucketize(score, cuts).float()
