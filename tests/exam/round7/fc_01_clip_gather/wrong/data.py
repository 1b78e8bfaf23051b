import torch


class PairedData:
    """Captions and images drawn from shared latent topics; batch i depends only on (seed, i)."""

    def __init__(self, batch, seed=7):
        g = torch.Generator().manual_seed(seed)
        self.batch, self.seed = batch, seed
        self.topic_img = torch.randn(64, 48, generator=g)

    def get(self, i, rank, world):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        ids = torch.randint(0, 64, (self.batch, 5), generator=g)
        pix = self.topic_img[ids].mean(1) + 0.3 * torch.randn(self.batch, 48, generator=g)
        n = self.batch // world
        sl = slice(rank * n, (rank + 1) * n)
        return pix[sl], ids[sl]
