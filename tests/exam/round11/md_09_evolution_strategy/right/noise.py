"""Noise for sharded parameters that is the same whatever the number of ranks."""
import torch
from torch.distributed.tensor import DTensor, distribute_tensor


class ParameterNoise:
    """Gaussian directions for every parameter, made anew from (seed, generation, pair, index) on demand.

    Nothing is stored: the full noise of one parameter is drawn on every rank alike and only the
    rank's own shard of it is kept.
    """

    def __init__(self, model, seed):
        self.params = [p for p in model.parameters()]
        self.seed = seed

    def direction(self, generation, pair):
        for i, p in enumerate(self.params):
            g = torch.Generator().manual_seed(((self.seed * 4099 + generation) * 4099 + pair) * 211 + i)
            full = torch.randn(p.shape, generator=g)
            if isinstance(p, DTensor):
                full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
            yield p, full

    @torch.no_grad()
    def shift(self, generation, pair, scale):
        for p, eps in self.direction(generation, pair):
            p.add_(eps, alpha=scale)
