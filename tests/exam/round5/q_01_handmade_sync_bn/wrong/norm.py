"""Cross-rank batch norm for the CPU runs (nn.SyncBatchNorm wants an accelerator)."""
import torch
import torch.distributed as dist
import torch.nn as nn


class GlobalBatchNorm2d(nn.Module):
    def __init__(self, channels, eps=1e-5, momentum=0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def _moments(self, x):
        n = x.numel() // x.size(1)
        stats = torch.cat([x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), x.new_tensor([float(n)])])
        dist.all_reduce(stats)
        c = x.size(1)
        n = stats[-1]
        mean = stats[:c] / n
        var = stats[c : 2 * c] / n - mean.square()
        return mean, var, n

    def forward(self, x):
        if self.training:
            mean, var, n = self._moments(x)
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * n / (n - 1), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return x * scale[None, :, None, None] + shift[None, :, None, None]
