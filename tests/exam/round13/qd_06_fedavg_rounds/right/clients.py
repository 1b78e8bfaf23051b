import torch


class Client:
    """A hospital with its own covariate shift and number of records."""

    def __init__(self, ident, records, dim, seed):
        g = torch.Generator().manual_seed(seed + ident)
        common = torch.randn(dim, generator=torch.Generator().manual_seed(seed + 1000))
        self.ident, self.records = ident, records
        self.x = torch.randn(records, dim, generator=g) + 0.8 * torch.randn(dim, generator=g)
        self.y = torch.tanh(self.x @ (common + 0.6 * torch.randn(dim, generator=g)))[:, None]

    def batch(self, round_, step, size, rank, world):
        g = torch.Generator().manual_seed(round_ * 100 + step)
        idx = torch.randperm(self.records, generator=g)[:size][rank::world]
        return self.x[idx], self.y[idx]
