import torch

VOCAB, MASK, LENGTH = 25, 24, 14


def sequences(step, n):
    g = torch.Generator().manual_seed(step + 300)
    start, stride = torch.randint(24, (n, 1), generator=g), torch.randint(1, 4, (n, 1), generator=g)
    return (start + stride * torch.arange(LENGTH)) % 24


def masks(step, n, share):
    """Exactly the same number of masked places in every row: all ranks have equally many."""
    g = torch.Generator().manual_seed(step + 600)
    k = int(share * LENGTH)
    order = torch.rand(n, LENGTH, generator=g).argsort(1)
    return order < k


def uniforms(step, n):
    g = torch.Generator().manual_seed(step + 900)
    return torch.rand(n, LENGTH, generator=g)
