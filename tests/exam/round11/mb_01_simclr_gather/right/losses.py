import torch
import torch.distributed as dist
import torch.nn.functional as F


class GatherLayer(torch.autograd.Function):
    """all_gather along dim 0 that lets the gradient through."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


def nt_xent(z1, z2, temperature=0.2):
    """NT-Xent of the local anchors against the views of the whole batch."""
    n, rank = z1.shape[0], dist.get_rank()
    all1, all2 = GatherLayer.apply(z1), GatherLayer.apply(z2)
    total = all1.shape[0]
    own = torch.arange(n) + rank * n
    keys = torch.cat([all1, all2])

    def one_side(anchor, self_index, positive_index):
        logits = anchor @ keys.t() / temperature
        mask = F.one_hot(self_index, 2 * total).bool()
        return F.cross_entropy(logits.masked_fill(mask, float("-inf")), positive_index)

    return 0.5 * (one_side(z1, own, own + total) + one_side(z2, own + total, own))
