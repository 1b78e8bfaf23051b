"""Result pages with clicks. Pages have 2 to 8 results; a click needs that the result is looked at and that it is good."""
import torch

PLACES = 8


def make_sessions(n, seed):
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(2, PLACES + 1, (n,), generator=g)
    shown = torch.arange(PLACES) < length[:, None]
    x = torch.randn(n, PLACES, 5, generator=g)
    looked = torch.rand(n, PLACES, generator=g) < 1.0 / (1.0 + 0.4 * torch.arange(PLACES))
    good = torch.rand(n, PLACES, generator=g) < torch.sigmoid(1.5 * x[..., 0] - x[..., 1] * x[..., 2])
    return x, shown, (looked & good & shown).float()
