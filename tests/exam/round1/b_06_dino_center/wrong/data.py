import torch


class TwoViewSet:
    """Noisy 1x10x10 prototypes; a view is a scaled, partly erased and noised copy."""

    def __init__(self, n=600, classes=5, seed=0):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(classes, 1, 10, 10, generator=g)
        self.y = torch.randint(0, classes, (n,), generator=g)
        self.x = 2.5 * proto[self.y] + 0.4 * torch.randn(n, 1, 10, 10, generator=g)

    def batch(self, step, size):
        g = torch.Generator().manual_seed(9_000 + step)
        idx = torch.randint(0, len(self.x), (size,), generator=g)
        return self.view(self.x[idx], g), self.view(self.x[idx], g)

    @staticmethod
    def view(x, g):
        gain = 0.8 + 0.4 * torch.rand(len(x), 1, 1, 1, generator=g)
        keep = (torch.rand(x.shape, generator=g) > 0.1).float()
        return x * gain * keep + 0.2 * torch.randn(x.shape, generator=g)
