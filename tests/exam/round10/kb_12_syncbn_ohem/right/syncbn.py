import torch
import torch.distributed as dist
import torch.nn as nn


class _GlobalNorm(torch.autograd.Function):
    """Batch normalisation with the statistics of the batch of all ranks (works on CPU)."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        stats = torch.stack([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))]).double()
        count = torch.full((1, x.shape[1]), float(x.numel() // x.shape[1]), dtype=torch.float64)
        stats = torch.cat([stats, count])
        dist.all_reduce(stats)
        mean = stats[0] / stats[2]
        var = stats[1] / stats[2] - mean ** 2
        invstd = (var + eps).rsqrt().to(x.dtype)
        mean, var = mean.to(x.dtype), var.to(x.dtype)
        xhat = (x - mean[:, None, None]) * invstd[:, None, None]
        ctx.save_for_backward(xhat, weight, invstd)
        ctx.count = stats[2, 0].item()
        ctx.mark_non_differentiable(mean, var)
        return xhat * weight[:, None, None] + bias[:, None, None], mean, var

    @staticmethod
    def backward(ctx, grad, *_):
        xhat, weight, invstd = ctx.saved_tensors
        grad_bias = grad.sum((0, 2, 3))
        grad_weight = (grad * xhat).sum((0, 2, 3))
        # the input gradient needs the sums over all ranks, the parameters' are averaged by FSDP afterwards
        sums = torch.stack([grad_bias, grad_weight])
        dist.all_reduce(sums)
        mean_g, mean_gx = (sums / ctx.count)[:, :, None, None]
        grad_x = (weight * invstd)[:, None, None] * (grad - mean_g - xhat * mean_gx)
        return grad_x, grad_weight, grad_bias, None


class GlobalBatchNorm(nn.Module):
    def __init__(self, ch, eps=1e-5, momentum=0.1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(ch)), nn.Parameter(torch.zeros(ch))
        self.register_buffer("running_mean", torch.zeros(ch))
        self.register_buffer("running_var", torch.ones(ch))
        self.eps, self.momentum = eps, momentum

    def forward(self, x):
        if self.training:
            y, mean, var = _GlobalNorm.apply(x, self.weight, self.bias, self.eps)
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var, self.momentum)
            return y
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]
