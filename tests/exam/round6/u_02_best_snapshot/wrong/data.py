import torch


def discs(n, seed, noise):
    """Noisy images of discs and their masks; the training masks are few, so the net overfits."""
    g = torch.Generator().manual_seed(seed)
    ys, xs = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    cy, cx = (3 + 6 * torch.rand(2, n, 1, 1, generator=g))
    r = 2 + 2 * torch.rand(n, 1, 1, generator=g)
    mask = (((ys - cy) ** 2 + (xs - cx) ** 2) < r ** 2).float()
    image = mask + noise * torch.randn(mask.shape, generator=g)
    return image[:, None], mask[:, None]


def share(tensor, rank, world):
    return tensor[rank::world]


def validation_set(n, seed):
    """Half of the images come from a good scanner, half from a noisy one."""
    good, noisy = discs(n // 2, seed, noise=0.3), discs(n // 2, seed + 1, noise=1.5)
    return torch.cat([good[0], noisy[0]]), torch.cat([good[1], noisy[1]])


def block_share(tensor, rank, world):
    n = tensor.shape[0] // world
    return tensor[rank * n:(rank + 1) * n]
