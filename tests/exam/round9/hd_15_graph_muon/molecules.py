import torch


def molecules(n, seed, size=10):
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 6, (n, size), generator=g)
    bonds = torch.rand(n, size, size, generator=g) < 0.2
    bonds = bonds | bonds.transpose(1, 2) | torch.eye(size, dtype=torch.bool)
    charge = torch.linspace(-1, 1, 6)[kinds]
    energy = (charge[:, :, None] * charge[:, None] * bonds).sum((1, 2)) / size
    return kinds, bonds, energy[:, None]
