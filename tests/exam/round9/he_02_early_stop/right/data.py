import torch


def make_split(n, dim, classes, noise, seed):
    """Gaussian blobs on a fixed set of centres; a share of the training labels is flipped."""
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(77)) * 0.55
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    x = centres[y] + torch.randn(n, dim, generator=g)
    flip = torch.rand(n, generator=g) < noise
    y = torch.where(flip, torch.randint(0, classes, (n,), generator=g), y)
    return x, y


def epoch_batches(n, batch, epoch, rank, world):
    g = torch.Generator().manual_seed(500 + epoch)
    order = torch.randperm(n, generator=g)
    for i in range(0, n - batch + 1, batch):
        yield order[i : i + batch][rank::world]
