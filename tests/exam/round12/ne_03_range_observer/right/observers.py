import torch
import torch.distributed as dist
from torch import nn


class RangeObserver(nn.Module):
    """Moving estimate of the largest activation magnitude of the global batch, for int8 export."""

    def __init__(self, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("amax", torch.zeros(()))

    @torch.no_grad()
    def forward(self, x):
        if self.training:
            peak = x.detach().abs().max()
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            self.amax.copy_(torch.where(self.amax > 0, self.momentum * self.amax + (1 - self.momentum) * peak, peak))


class ObservedLinear(nn.Linear):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        self.observer = RangeObserver()

    def forward(self, x):
        self.observer(x)
        return super().forward(x)
