import torch
import torch.distributed as dist
import torch.nn as nn


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        # every rank's loss depends on the sum
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class GlobalBatchNorm(nn.Module):
    """Batch norm over the batch of all ranks (CPU stand-in for SyncBatchNorm)."""

    def __init__(self, ch, momentum=0.1, eps=1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(ch))
        self.bias = nn.Parameter(torch.zeros(ch))
        self.register_buffer("mean", torch.zeros(ch))
        self.register_buffer("var", torch.ones(ch))
        self.refreshing = 0

    def begin_refresh(self):
        self.refreshing = 1

    def end_refresh(self):
        self.refreshing = 0

    def forward(self, x):
        if self.training:
            count = x.numel() / x.shape[1] * dist.get_world_size()
            mean = _SumOverRanks.apply(x.sum((0, 2, 3))) / count
            centred = x - mean[:, None, None]
            var = _SumOverRanks.apply(centred.square().sum((0, 2, 3))) / count
            with torch.no_grad():
                w = self.momentum if not self.refreshing else 1 / self.refreshing
                self.mean.lerp_(mean, w)
                self.var.lerp_(var * count / (count - 1), w)
                self.refreshing += self.refreshing > 0
        else:
            mean, var = self.mean, self.var
            centred = x - mean[:, None, None]
        scale = self.weight * torch.rsqrt(var + self.eps)
        return centred * scale[:, None, None] + self.bias[:, None, None]
