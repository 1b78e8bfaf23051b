import torch


def make(n, seed, size=12):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    c = 2 + (size - 4) * torch.rand(2, n, 2, 1, 1, generator=g)
    disc = ((yy - c[0, :, 0]) ** 2 + (xx - c[0, :, 1]) ** 2) < 7
    square = torch.maximum((yy - c[1, :, 0]).abs(), (xx - c[1, :, 1]).abs()) < 2
    mask = torch.zeros(n, size, size, dtype=torch.long)
    mask[disc] = 1
    mask[square] = 2
    img = torch.stack([(mask == 1).float(), (mask == 2).float()], 1)
    return img + 0.5 * torch.randn(img.shape, generator=g), mask
