import torch


def regime_series(n, length, g):
    """AR(2) series that jump between three regimes."""
    coef = torch.tensor([[0.5, 0.3], [-0.6, 0.2], [1.2, -0.7]])
    regime = torch.randint(0, 3, (n,), generator=g)
    x = [torch.randn(n, generator=g), torch.randn(n, generator=g)]
    for _ in range(length - 2):
        jump = torch.rand(n, generator=g) < 0.05
        regime = torch.where(jump, torch.randint(0, 3, (n,), generator=g), regime)
        c = coef[regime]
        x.append(c[:, 0] * x[-1] + c[:, 1] * x[-2] + 0.3 * torch.randn(n, generator=g))
    return torch.stack(x, 1)


def lagged(x, lags=8):
    w = x.unfold(1, lags + 1, 1)
    return w[..., :lags], w[..., lags:]
