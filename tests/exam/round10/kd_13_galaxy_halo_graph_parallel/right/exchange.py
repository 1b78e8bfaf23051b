"""Differentiable exchange of node rows between ranks that own different parts of one graph."""
import torch
import torch.distributed as dist


class AllNodes(torch.autograd.Function):
    """Rows of all ranks in rank order. Backward sums the gradients of all ranks and returns the own part."""

    @staticmethod
    def forward(ctx, rows, sizes):
        ctx.sizes = sizes
        width = rows.shape[1]
        most = max(sizes)
        padded = torch.zeros(most, width, dtype=rows.dtype)
        padded[:rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([p[:n] for p, n in zip(parts, sizes)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        rank = dist.get_rank()
        begin = sum(ctx.sizes[:rank])
        return grad[begin:begin + ctx.sizes[rank]], None


class SumOver(torch.autograd.Function):
    """Sum over ranks whose result every rank uses for the same replicated loss; each rank's term has gradient 1."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad
