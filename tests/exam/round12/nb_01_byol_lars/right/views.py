import torch


class Views:
    """Synthetic images: a class colour pattern plus noise; two augmented views of each."""

    def __init__(self, n=128, seed=11):
        g = torch.Generator().manual_seed(seed)
        patterns = torch.randn(8, 3, 16, 16, generator=g)
        self.images = patterns[torch.arange(n) % 8] + 0.3 * torch.randn(n, 3, 16, 16, generator=g)
        self.seed = seed

    def batch(self, step, size, rank, world):
        g = torch.Generator().manual_seed(self.seed * 7919 + step)
        idx = torch.randint(len(self.images), (size,), generator=g)
        x = self.images[idx]
        jitter = 0.2 * torch.randn(2, *x.shape, generator=g)
        flip = torch.rand(2, size, generator=g) < 0.5
        out = []
        for k in range(2):
            v = torch.where(flip[k, :, None, None, None], x.flip(3), x) + jitter[k]
            out.append(v[rank::world])
        return out
