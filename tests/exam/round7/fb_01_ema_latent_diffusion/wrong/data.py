import torch

CHANNEL_SCALE = torch.tensor([4.0, 2.5, 6.0, 3.0])
CHANNEL_SHIFT = torch.tensor([1.0, -2.0, 0.5, 3.0])


def latents(n, generator, size=8):
    """Smooth random fields in place of autoencoder latents."""
    base = torch.randn(n, 4, 4, 4, generator=generator)
    z = torch.nn.functional.interpolate(base, size=(size, size), mode="bilinear")
    return z * CHANNEL_SCALE[None, :, None, None] + CHANNEL_SHIFT[None, :, None, None]


def diffusion_batch(step, batch_size, timesteps, seed, rank, world):
    """Global batch of a step; every rank takes its part of it."""
    g = torch.Generator().manual_seed(seed * 100003 + step)
    z = latents(batch_size, g)
    noise = torch.randn(z.shape, generator=g)
    t = torch.randint(0, timesteps, (batch_size,), generator=g)
    part = slice(rank * batch_size // world, (rank + 1) * batch_size // world)
    return z[part], noise[part], t[part]
