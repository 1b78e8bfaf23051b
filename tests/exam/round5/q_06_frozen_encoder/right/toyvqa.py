import torch


def toyvqa(n, seed):
    """Question q asks for the brightest channel in quadrant q."""
    g = torch.Generator().manual_seed(seed)
    img = torch.randn(n, 3, 12, 12, generator=g) * 0.4
    quad = torch.randint(3, (n, 4), generator=g)
    for i in range(4):
        r, c = divmod(i, 2)
        img[torch.arange(n), quad[:, i], r * 6 : r * 6 + 6, c * 6 : c * 6 + 6] += 1.5
    q = torch.randint(4, (n,), generator=g)
    return img, q, quad[torch.arange(n), q]
