import torch


def dataset(n, seed, kinds=8, dim=32):
    """Vectors in noisy clusters; the labels are used for the evaluation only."""
    g = torch.Generator().manual_seed(seed)
    centres = 1.2 * torch.randn(kinds, dim, generator=g)
    labels = torch.randint(kinds, (n,), generator=g)
    return centres[labels] + 0.8 * torch.randn(n, dim, generator=g), labels
