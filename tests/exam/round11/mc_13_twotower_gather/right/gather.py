import torch
import torch.distributed as dist


class GatherRows(torch.autograd.Function):
    """Rows of all ranks in rank order; the gradient of a row is summed over the ranks which used it."""

    @staticmethod
    def forward(ctx, x):
        world = dist.get_world_size()
        ctx.rank, ctx.rows = dist.get_rank(), x.shape[0]
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[ctx.rank * ctx.rows:(ctx.rank + 1) * ctx.rows]


gather_rows = GatherRows.apply
