import torch


class Shapes:
    """Noisy 8x8 prototypes of ten classes."""

    def __init__(self, rank, world, micro_batch, noise=1.5, seed=21):
        self.rank, self.world, self.micro_batch, self.noise = rank, world, micro_batch, noise
        self.proto = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(seed))

    def _draw(self, seed, n):
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(10, (n,), generator=g)
        x = self.proto[y] + self.noise * torch.randn(n, 1, 8, 8, generator=g)
        return x.chunk(self.world)[self.rank], y.chunk(self.world)[self.rank]

    def micro_batches(self, step, count):
        for i in range(count):
            yield self._draw(1000 * step + i, self.micro_batch)

    def test(self):
        return self._draw(99_999_999, 512)
