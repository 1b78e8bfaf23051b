"""Frechet distance between Gaussian fits of image features (a fixed random network stands in for Inception)."""
import torch
import torch.distributed as dist


def all_mean(x):
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


class Features:
    def __init__(self, pixels, dim=8, seed=123):
        g = torch.Generator().manual_seed(seed)
        self.w1 = torch.randn(pixels, 32, generator=g, dtype=torch.double) / pixels ** 0.5
        self.w2 = torch.randn(32, dim, generator=g, dtype=torch.double) / 32 ** 0.5

    def __call__(self, images):
        return torch.tanh(images.flatten(1).double() @ self.w1) @ self.w2


def moments(feats):
    """Mean and covariance of features which are spread over the ranks in equal parts."""
    mu = all_mean(feats.mean(dim=0))
    centred = feats - feats.mean(dim=0)
    cov = all_mean(centred.T @ centred / len(feats))
    return mu, cov


def frechet(a, b):
    (mu1, cov1), (mu2, cov2) = a, b
    cross = torch.linalg.eigvals(cov1 @ cov2).sqrt().real.sum()
    return ((mu1 - mu2).pow(2).sum() + cov1.trace() + cov2.trace() - 2 * cross).item()
