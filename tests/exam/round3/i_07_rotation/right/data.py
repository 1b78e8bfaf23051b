import math

import torch

FREQ = (1.0, 2.0, 3.5, 5.0)


def wave_batch(step, size, rank, world, length=32):
    """The samples of a step depend on the step number only."""
    g = torch.Generator().manual_seed(77_000 + step)
    y = torch.randint(0, len(FREQ), (size,), generator=g)
    phase = 2 * math.pi * torch.rand(size, 1, generator=g)
    t = torch.linspace(0, 1, length)
    x = torch.sin(2 * math.pi * torch.tensor(FREQ)[y][:, None] * t + phase) + 0.2 * torch.randn(
        size, length, generator=g
    )
    return x[rank::world, None], y[rank::world]
