"""Batch normalisation over the global batch, with the backward pass written by hand."""
import torch
import torch.distributed as dist
import torch.nn as nn


class _GlobalNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        n = x.numel() // x.shape[1] * dist.get_world_size()
        sums = torch.stack([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))]).double()
        dist.all_reduce(sums)
        mean, square = (sums / n).unbind()
        var = (square - mean * mean).clamp(min=0)
        inv = (var + eps).rsqrt().to(x.dtype)
        y = (x - mean.to(x.dtype)[:, None, None]) * inv[:, None, None]
        ctx.save_for_backward(y, inv)
        ctx.n = n
        mean, var = mean.to(x.dtype), var.to(x.dtype)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx, gy, _mean, _var):
        y, inv = ctx.saved_tensors
        sums = torch.stack([gy.sum((0, 2, 3)), (gy * y).sum((0, 2, 3))])
        dist.all_reduce(sums)
        a, b = (sums / ctx.n)[:, :, None, None].unbind()
        return inv[:, None, None] * (gy - a - y * b), None


class GlobalBatchNorm(nn.Module):
    def __init__(self, ch, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ch))
        self.bias = nn.Parameter(torch.zeros(ch))
        self.register_buffer("mean", torch.zeros(ch))
        self.register_buffer("var", torch.ones(ch))
        self.momentum, self.eps = momentum, eps
        self.track = True

    def forward(self, x):
        if self.training:
            x, mean, var = _GlobalNorm.apply(x, self.eps)
            if self.track:
                with torch.no_grad():
                    self.mean.lerp_(mean, self.momentum)
                    self.var.lerp_(var, self.momentum)
        else:
            x = (x - self.mean[:, None, None]) * (self.var[:, None, None] + self.eps).rsqrt()
        return x * self.weight[:, None, None] + self.bias[:, None, None]
