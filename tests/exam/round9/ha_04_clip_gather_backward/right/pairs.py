import torch

VOCAB = 30


def pairs(step, size, train=True):
    """Image: a blob whose place and frequency are told by the caption's words."""
    g = torch.Generator().manual_seed((17 if train else 9_000_017) + step)
    row, col, freq = (torch.randint(0, n, (size,), generator=g) for n in (6, 6, 5))
    axis = torch.arange(12.0)
    dy = (axis[None, :, None] - 2 * row[:, None, None]) ** 2
    dx = (axis[None, None, :] - 2 * col[:, None, None]) ** 2
    wave = torch.cos((freq[:, None, None] + 1) * 0.5 * axis[None, None, :])
    images = torch.exp(-(dx + dy) / 8) * (1 + wave) + 0.1 * torch.randn(size, 12, 12, generator=g)
    filler = torch.randint(17, VOCAB, (size, 3), generator=g)
    ids = torch.cat([torch.stack([row, 6 + col, 12 + freq], 1), filler], 1)
    return images.unsqueeze(1), ids
