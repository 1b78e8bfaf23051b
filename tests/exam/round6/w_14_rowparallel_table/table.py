"""Embedding table divided over the ranks by id modulo world size; not FSDP: only looked-up rows travel."""
import torch
import torch.distributed as dist
import torch.nn as nn


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class Exchange(torch.autograd.Function):
    """Sum of the ranks' partial rows for all ids, cut to the ids of this rank; the way back is an all_gather."""

    @staticmethod
    def forward(ctx, partial):
        rows = partial.clone()
        dist.all_reduce(rows)
        return rows.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        # the loss of the step is the mean over ranks, as FSDP takes it for the dense part
        return gather(grad) / dist.get_world_size()


class ModuloTable(nn.Module):
    def __init__(self, n, dim, seed):
        super().__init__()
        full = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) * 0.3
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.rows = nn.Parameter(full[self.rank::self.world].clone())

    def forward(self, ids):
        everyone = gather(ids)
        mine = (everyone % self.world == self.rank)
        partial = self.rows[everyone // self.world % len(self.rows)] * mine[..., None]
        return Exchange.apply(partial)

    def whole(self):
        parts = [torch.empty_like(self.rows) for _ in range(self.world)]
        dist.all_gather(parts, self.rows.detach().contiguous())
        return torch.stack(parts, dim=1).flatten(0, 1)
