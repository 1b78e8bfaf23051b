import torch


def blobs(n, seed, classes=5, size=10):
    """Images with one bright spot pattern per class, shifted at random, in noise."""
    patterns = torch.randn(classes, 2, 5, 5, generator=torch.Generator().manual_seed(70))
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    images = 0.7 * torch.randn(n, 2, size, size, generator=g)
    shifts = torch.randint(size - 4, (n, 2), generator=g).tolist()
    for image, label, (r, c) in zip(images, labels, shifts):
        image[:, r:r + 5, c:c + 5] += patterns[label]
    return images, labels


def augment(images, g):
    """Random flips and gains, one draw per image of the global batch."""
    flip = torch.rand(len(images), generator=g) < 0.5
    gain = 0.8 + 0.4 * torch.rand(len(images), generator=g)
    return torch.where(flip.view(-1, 1, 1, 1), images.flip(3).flip(2), images) * gain.view(-1, 1, 1, 1)
