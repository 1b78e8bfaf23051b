import torch


def images(n=512, classes=5):
    g = torch.Generator().manual_seed(1)
    proto = torch.randn(classes, 1, 8, 8, generator=g)
    y = torch.randint(0, classes, (n,), generator=g)
    return proto[y] + torch.randn(n, 1, 8, 8, generator=g), torch.eye(classes)[y]


def mixup(x, y, step):
    """Mixes the whole global batch with its mirror; all ranks draw the same coefficients."""
    g = torch.Generator().manual_seed(9000 + step)
    lam = 0.5 + 0.5 * torch.rand(len(x), generator=g)
    return (
        lam.view(-1, 1, 1, 1) * x + (1 - lam).view(-1, 1, 1, 1) * x.flip(0),
        lam[:, None] * y + (1 - lam)[:, None] * y.flip(0),
    )
