"""Differentiable gather of node features over the ranks."""
import torch
import torch.distributed as dist


class GatherRows(torch.autograd.Function):
    """Concatenate the row blocks of all ranks; backward sums the gradients and keeps the own block."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        lo = dist.get_rank() * ctx.rows
        return grad[lo:lo + ctx.rows]


def gather_rows(x):
    return GatherRows.apply(x)
