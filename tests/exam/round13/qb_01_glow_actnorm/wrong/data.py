import torch


def textures(n, size=8, seed=0):
    """Grey-level stripes with contrast and offset far from (0, 1)."""
    g = torch.Generator().manual_seed(seed)
    phase = torch.rand(n, 1, 1, generator=g) * 6.28
    freq = 0.5 + torch.rand(n, 1, 1, generator=g)
    ramp = torch.arange(size).float()
    img = torch.sin(freq * (ramp[None, :, None] + 0.5 * ramp[None, None, :]) + phase)
    img = 3.0 + 0.4 * img + 0.1 * torch.randn(n, size, size, generator=g)
    return img.unsqueeze(1)


def global_batch(images, step, size):
    g = torch.Generator().manual_seed(1000 + step)
    return images[torch.randint(len(images), (size,), generator=g)]
