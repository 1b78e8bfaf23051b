"""Exchange of node features between the parts of a partitioned graph."""
import torch
import torch.distributed as dist


class GatherNodes(torch.autograd.Function):
    """Rows of this part -> rows of all parts, in the order of the ranks (parts of equal size)."""

    @staticmethod
    def forward(ctx, rows):
        ctx.n = rows.shape[0]
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        first = dist.get_rank() * ctx.n
        return grad[first:first + ctx.n]


def gather_nodes(rows):
    return GatherNodes.apply(rows)


def global_sum(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value
