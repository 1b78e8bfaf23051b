import torch


def make_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    f = 1 + 2 * torch.rand(n, 1, 1, 1, generator=g)
    u = torch.linspace(0, 3.1, 12)[None, None, :, None]
    contrast = torch.linspace(0.5, 2.0, n)[:, None, None, None]
    return contrast * torch.sin(f * u + torch.zeros(1, 1, 1, 12)) + 0.1 * torch.randn(n, 1, 12, 12, generator=g)


def draw(images, step, batch, rank, world):
    g = torch.Generator().manual_seed(555 + step)
    idx = torch.randint(len(images), (batch,), generator=g)
    noise = torch.randn(batch, 3, 4, 4, generator=g)
    t = torch.rand(batch, generator=g)
    return tuple(v.chunk(world)[rank] for v in (images[idx], noise, t))
