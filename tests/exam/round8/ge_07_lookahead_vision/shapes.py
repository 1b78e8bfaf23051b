"""Small images of coloured stripes; the class is the direction and the width of the stripes."""
import torch

CLASSES = 6


def stripes(n, seed, size=12):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    direction = torch.stack([xx, yy, xx + yy])[label % 3].float()
    wave = torch.tensor([0.9, 1.7])[label // 3].view(-1, 1, 1)
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    colour = torch.rand(n, 3, 1, 1, generator=g)
    image = colour * torch.sin(direction * wave + phase).unsqueeze(1)
    return image + 0.4 * torch.randn(n, 3, size, size, generator=g), label
