import torch


def make_claims(n=1536, columns=12, seed=21):
    """Insurance claims in order of arrival: the portfolio changes slowly, the columns have wild units."""
    g = torch.Generator().manual_seed(seed)
    unit = 10 ** (3 * torch.rand(columns, generator=g) - 1)
    z = torch.randn(n, columns, generator=g)
    skew = z + 0.4 * z ** 2
    drift = torch.linspace(0, 1.5, n)[:, None] * torch.randn(columns, generator=g)
    x = (skew + drift) * unit + 5 * unit
    w = torch.randn(columns, generator=g) / columns ** 0.5
    y = ((z @ w + 0.5 * z[:, 0] * z[:, 1] + 0.3 * torch.randn(n, generator=g)) > 0).float()
    return x, y
