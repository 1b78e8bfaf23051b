import torch


class ShapesDataset:
    """Small synthetic images: a few oriented gratings with random phase and colour."""

    def __init__(self, n=256, size=12, classes=6, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (n,), generator=g)
        yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
        angle = self.labels.float() * 3.1416 / classes
        phase = torch.rand(n, generator=g) * 6.28
        wave = torch.cos(8 * (xx[None] * angle.cos()[:, None, None] + yy[None] * angle.sin()[:, None, None])
                         + phase[:, None, None])
        colour = torch.rand(n, 3, 1, 1, generator=g)
        self.images = wave[:, None] * colour + 0.1 * torch.randn(n, 3, size, size, generator=g)

    def __len__(self):
        return len(self.images)


def augment(image, g):
    """Random flip, shift, brightness and noise, all drawn from the generator of this sample."""
    if torch.rand((), generator=g) < 0.5:
        image = image.flip(-1)
    dy, dx = torch.randint(-2, 3, (2,), generator=g).tolist()
    image = image.roll((dy, dx), (-2, -1))
    image = image * (0.7 + 0.6 * torch.rand((), generator=g))
    return image + 0.05 * torch.randn(image.shape, generator=g)


def two_views(dataset, indices, epoch, seed):
    a, b = [], []
    for i in indices.tolist():
        g = torch.Generator().manual_seed(seed * 1_000_003 + epoch * 10_007 + i)
        a.append(augment(dataset.images[i], g))
        b.append(augment(dataset.images[i], g))
    return torch.stack(a), torch.stack(b)
