"""Frechet distance between real and generated samples in a fixed feature space."""
import torch
import torch.distributed as dist


class Features:
    def __init__(self, pixels, dim, seed=123):
        g = torch.Generator().manual_seed(seed)
        self.w = torch.randn(pixels, dim, generator=g, dtype=torch.float64) / pixels ** 0.5

    def __call__(self, images):
        return torch.tanh(images.double().flatten(1) @ self.w)


def statistics(feats):
    """Mean and covariance over the samples of all ranks."""
    count = torch.tensor(float(feats.shape[0]), dtype=torch.float64)
    mean = feats.sum(0)
    dist.all_reduce(count)
    dist.all_reduce(mean)
    mean = mean / count
    centred = feats - mean
    cov = centred.T @ centred
    dist.all_reduce(cov)
    return mean, cov / (count - 1)


def frechet(a, b):
    (m1, c1), (m2, c2) = a, b
    # trace of sqrt(c1 c2) through the eigenvalues, which are real and not negative
    eig = torch.linalg.eigvals(c1 @ c2).real.clamp(min=0)
    return ((m1 - m2).pow(2).sum() + c1.trace() + c2.trace() - 2 * eig.sqrt().sum()).item()
