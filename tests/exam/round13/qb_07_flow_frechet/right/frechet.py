"""Frechet distance between Gaussians fitted to features of real and generated images."""
import torch
import torch.distributed as dist


class Features:
    """Fixed random projection; stands in for a pretrained network."""

    def __init__(self, pixels, dim=6):
        self.w = torch.randn(pixels, dim, generator=torch.Generator().manual_seed(99)) / pixels ** 0.5

    def __call__(self, x):
        return torch.tanh(x @ self.w).double()


def across_ranks(t):
    dist.all_reduce(t)
    return t / dist.get_world_size()


def fit(feats):
    """Mean and covariance of the features held by all ranks (equal shares)."""
    mean = feats.mean(0)
    second = feats.T @ feats / len(feats)
    mean, second = across_ranks(mean), across_ranks(second)
    return mean, second - torch.outer(mean, mean)


def distance(a, b):
    (ma, ca), (mb, cb) = a, b
    va, ea = torch.linalg.eigh(ca)
    root = ea @ torch.diag(va.clamp(min=0).sqrt()) @ ea.T
    cross = torch.linalg.eigvalsh(root @ cb @ root).clamp(min=0).sqrt().sum()
    return ((ma - mb).square().sum() + ca.trace() + cb.trace() - 2 * cross).item()
