import torch

DIM, CLASSES = 12, 5


class Blobs:
    """Gaussian classes with 15 % wrong labels."""

    def __init__(self, seed=41, n=1600):
        g = torch.Generator().manual_seed(seed)
        centre = torch.randn(CLASSES, DIM, generator=g) * 1.2
        y = torch.randint(0, CLASSES, (n,), generator=g)
        self.x = centre[y] + torch.randn(n, DIM, generator=g)
        wrong = torch.rand(n, generator=g) < 0.15
        self.y = torch.where(wrong, torch.randint(0, CLASSES, (n,), generator=g), y)

    def stream(self, generation, batch, rank, world, skip):
        """Endless batches of one generation, beginning at batch number `skip`."""
        k = skip
        while True:
            g = torch.Generator().manual_seed(1_000_000 * generation + k)
            idx = torch.randint(0, len(self.x), (batch,), generator=g).chunk(world)[rank]
            yield self.x[idx], self.y[idx]
            k += 1
