import torch


class TwoSpirals:
    """Two noisy spirals: a few regions are much harder than the rest."""

    def __init__(self, n=600, seed=6):
        g = torch.Generator().manual_seed(seed)
        label = torch.randint(0, 2, (n,), generator=g)
        r = torch.rand(n, generator=g) ** 0.7
        angle = 9.0 * r + 3.14159 * label
        pts = torch.stack([r * torch.cos(angle), r * torch.sin(angle)], 1)
        self.x = pts * 2 + 0.12 * torch.randn(n, 2, generator=g)
        self.y = label

    def __len__(self):
        return len(self.y)
