import torch


class NoiseAndImages:
    """Stream of global batches of real images and latent codes; the position is the state of one generator
    that is the same on all ranks."""

    def __init__(self, batch, zdim, rank, world, seed):
        self.batch, self.zdim, self.rank, self.world = batch, zdim, rank, world
        self.g = torch.Generator().manual_seed(seed)

    def _mine(self, x):
        return x[self.rank::self.world]

    def real(self):
        c = torch.rand(self.batch, 2, generator=self.g) * 3 + 2
        yy, xx = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        d = (yy - c[:, :1, None]) ** 2 + (xx - c[:, 1:, None]) ** 2
        return self._mine((2 * torch.exp(-d / 4) - 1)[:, None])

    def codes(self):
        return self._mine(torch.randn(self.batch, self.zdim, generator=self.g))

    def __next__(self):
        return self.real(), self.codes()

    def __iter__(self):
        return self

    def state_dict(self):
        return {"rng": self.g.get_state()}

    def load_state_dict(self, sd):
        self.g.set_state(sd["rng"])
