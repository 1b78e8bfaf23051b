"""Exchange of tokens between ranks, with gradients."""
import torch
import torch.distributed as dist


def _gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def _scatter_sum(x):
    parts = x.contiguous().clone()
    dist.all_reduce(parts)
    return parts.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


class Gather(torch.autograd.Function):
    """Tokens of all ranks; backwards every rank gets the sum of what the ranks want of its tokens."""

    @staticmethod
    def forward(ctx, x):
        return _gather(x)

    @staticmethod
    def backward(ctx, grad):
        return _scatter_sum(grad)


class ScatterSum(torch.autograd.Function):
    """Sum over the ranks of partial results, each rank keeps its own tokens."""

    @staticmethod
    def forward(ctx, x):
        return _scatter_sum(x)

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad)


gather, scatter_sum = Gather.apply, ScatterSum.apply
