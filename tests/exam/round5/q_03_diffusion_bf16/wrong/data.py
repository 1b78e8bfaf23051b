import torch


def blobs(n, seed, size=8):
    g = torch.Generator().manual_seed(seed)
    c = torch.rand(n, 2, generator=g) * 1.2 - 0.6
    grid = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    d = (xx - c[:, 0, None, None]) ** 2 + (yy - c[:, 1, None, None]) ** 2
    return (2 * torch.exp(-d / 0.15) - 1)[:, None]


def draw(data, step, batch, steps_total, seed=11):
    """Global batch for a step: images, timesteps and noise, the same on every rank."""
    g = torch.Generator().manual_seed(seed * 100003 + step)
    x = data[torch.randint(len(data), (batch,), generator=g)]
    t = torch.randint(steps_total, (batch,), generator=g)
    return x, t, torch.randn(x.shape, generator=g)
