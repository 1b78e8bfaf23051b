import torch


def make_items(n, dim=32, seed=0):
    g = torch.Generator().manual_seed(seed)
    basis = torch.randn(6, dim, generator=torch.Generator().manual_seed(99))
    return torch.randn(n, 6, generator=g) @ basis


def two_views(items, gen, noise=0.7):
    """Both views of the whole batch, so that every rank uses the same random numbers."""
    shape = (len(items), items.shape[1])
    keep = [(torch.rand(shape, generator=gen) > 0.2).float() for _ in range(2)]
    return [k * items + noise * torch.randn(shape, generator=gen) for k in keep]
