import torch


def make_frames(n=512, dim=16, kinds=12, seed=50):
    """Audio-like feature frames around a dozen prototypes of very unequal frequency."""
    g = torch.Generator().manual_seed(seed)
    proto = 2 * torch.randn(kinds, dim, generator=g)
    freq = torch.arange(1, kinds + 1).float().pow(-1.2)
    k = torch.multinomial(freq, n, replacement=True, generator=g)
    return proto[k] + 0.25 * torch.randn(n, dim, generator=g)


def local_part(data, step, batch, rank, world):
    ids = torch.randperm(len(data), generator=torch.Generator().manual_seed(60 + step))[:batch]
    return data[ids].chunk(world)[rank]
