"""Embedding tables whose rows are dealt out to the ranks (row i lives on rank i % world). Not touched by FSDP."""
import torch
import torch.distributed as dist
from torch import nn


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids):
        rank, world = dist.get_rank(), dist.get_world_size()
        every = [torch.empty_like(ids) for _ in range(world)]
        dist.all_gather(every, ids)
        flat = torch.cat([e.flatten() for e in every])
        mine = (flat % world) == rank
        rows = flat[mine] // world
        out = weight.new_zeros(len(flat), weight.shape[1])
        out[mine] = weight[rows]
        dist.all_reduce(out)
        ctx.save_for_backward(mine, rows)
        ctx.shape = weight.shape
        n = ids.numel()
        return out[rank * n:(rank + 1) * n].view(*ids.shape, -1)

    @staticmethod
    def backward(ctx, grad):
        mine, rows = ctx.saved_tensors
        world = dist.get_world_size()
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        every = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(every, grad)
        # each rank's loss is a mean over its own samples; the objective is the mean of those
        flat = torch.cat(every)[mine] / world
        out = flat.new_zeros(ctx.shape).index_add_(0, rows, flat)
        return out, None


class RowShardedTable(nn.Module):
    def __init__(self, rows, dim, seed):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        full = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)) / dim ** 0.5
        self.rows = rows
        self.weight = nn.Parameter(full[rank::world].clone())

    def forward(self, ids):
        return Lookup.apply(self.weight, ids)


def gather_rows(local, rows):
    """The whole table (or its row-wise state) from the pieces of all ranks."""
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, local.detach())
    full = local.new_empty(rows, *local.shape[1:])
    for r, piece in enumerate(pieces):
        full[r::len(pieces)] = piece
    return full


def own_rows(full):
    return full[dist.get_rank()::dist.get_world_size()]


class RowWiseAdagrad:
    """One accumulator per row; rows that no sample used stay as they are."""

    def __init__(self, tables, lr):
        self.tables, self.lr = tables, lr
        self.acc = [torch.zeros(len(t.weight)) for t in tables]

    @torch.no_grad()
    def step(self):
        for t, acc in zip(self.tables, self.acc):
            g = t.weight.grad
            acc += g.square().mean(1)
            t.weight -= self.lr * g / (acc.sqrt() + 1e-8)[:, None]
            t.weight.grad = None
