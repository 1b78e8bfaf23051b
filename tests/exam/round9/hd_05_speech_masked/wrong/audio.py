import torch


def spectrograms(step, n, frames=40, bins=20):
    """Moving formants on a noisy background."""
    g = torch.Generator().manual_seed(9000 + step)
    t = torch.linspace(0, 1, frames)[None, :, None]
    f = torch.arange(bins)[None, None, :]
    spec = 0.1 * torch.randn(n, frames, bins, generator=g)
    for _ in range(2):
        a, b = (bins * torch.rand(n, 1, 1, generator=g) for _ in range(2))
        spec += torch.exp(-((f - a - (b - a) * t) ** 2) / 4)
    return spec


class SpanMasker:
    """Masks random spans; every rank draws its own."""

    def __init__(self, seed, rank, spans=3, width=5):
        self.g = torch.Generator().manual_seed(seed + 1009 * rank)
        self.spans, self.width = spans, width

    def __call__(self, n, frames):
        start = torch.randint(0, frames - self.width, (n, self.spans, 1), generator=self.g)
        pos = (start + torch.arange(self.width)).flatten(1)
        return torch.zeros(n, frames, dtype=torch.bool).scatter_(1, pos, True)

    def state(self):
        return self.g.get_state()

    def set_state(self, state):
        self.g.set_state(state)
