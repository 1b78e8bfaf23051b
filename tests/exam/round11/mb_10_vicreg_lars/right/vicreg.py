import torch
import torch.distributed as dist
import torch.nn.functional as F


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


def vicreg_loss(a, b, sim=25.0, var=25.0, cov=1.0):
    """Value of the whole batch; every rank returns the same number. The backward pass through SumOverRanks adds the
    gradients of all ranks' copies of the loss, and FSDP takes the mean over ranks afterwards."""
    n = a.shape[0] * dist.get_world_size()
    dim = a.shape[1]
    loss = sim * SumOverRanks.apply((a - b).pow(2).sum()) / (n * dim)
    for z in (a, b):
        mean = SumOverRanks.apply(z.sum(0)) / n
        c = z - mean
        C = SumOverRanks.apply(c.t() @ c) / (n - 1)
        std = (C.diagonal() + 1e-4).sqrt()
        off = C - torch.diag(C.diagonal())
        loss = loss + var * F.relu(1 - std).mean() / 2 + cov * off.pow(2).sum() / dim
    return loss
