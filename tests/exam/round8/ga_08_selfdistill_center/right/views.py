import torch


class Views:
    """Two noisy, masked views of points around hidden prototypes."""

    def __init__(self, dim=24, kinds=8):
        self.proto = torch.randn(kinds, dim, generator=torch.Generator().manual_seed(2)) + 0.7

    def __call__(self, step, size):
        g = torch.Generator().manual_seed(300 + step)
        base = self.proto[torch.randint(len(self.proto), (size,), generator=g)]
        out = []
        for _ in range(2):
            v = base + 0.3 * torch.randn(base.shape, generator=g)
            out.append(v * (torch.rand(base.shape, generator=g) > 0.2))
        return out
