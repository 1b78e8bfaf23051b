import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, inp=32, dim=64, out=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inp, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU())
        self.projector = nn.Linear(dim, out)

    def forward(self, x):
        return F.normalize(self.projector(self.trunk(x)), dim=-1)


class GatherRows(torch.autograd.Function):
    """all_gather along dim 0 whose backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[dist.get_rank() * ctx.rows : (dist.get_rank() + 1) * ctx.rows]


def info_nce(a, b, temperature=0.2):
    """a, b: this rank's rows of both views; negatives come from the whole global batch."""
    all_a, all_b = GatherRows.apply(a), GatherRows.apply(b)
    target = torch.arange(len(a)) + dist.get_rank() * len(a)
    return 0.5 * (
        F.cross_entropy(a @ all_b.T / temperature, target) + F.cross_entropy(b @ all_a.T / temperature, target)
    )
