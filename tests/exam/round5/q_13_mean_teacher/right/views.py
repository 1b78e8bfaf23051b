import torch


def strokes(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    u = torch.linspace(-1, 1, 10)
    ang = y * torch.pi / 4 + 0.15 * torch.randn(n, generator=g)
    d = ang.cos()[:, None, None] * u[:, None] - ang.sin()[:, None, None] * u[None]
    x = 3 + 2 * torch.exp(-d.square() / 0.05) + 0.4 * torch.randn(n, 10, 10, generator=g)
    return x[:, None], y


def augment(x, ids, step, view):
    """Shift and noise drawn from (sample, step, view) only: a sample's view never depends on the rank that has it."""
    out = torch.empty_like(x)
    for k, i in enumerate(ids.tolist()):
        g = torch.Generator().manual_seed((i * 4001 + step) * 2 + view)
        dy, dx = torch.randint(-1, 2, (2,), generator=g).tolist()
        out[k] = x[k].roll((dy, dx), (1, 2)) + 0.2 * torch.randn(x[k].shape, generator=g)
    return out
