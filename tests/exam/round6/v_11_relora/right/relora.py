import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import distribute_tensor


class ReLoRALinear(nn.Module):
    """A frozen matrix plus a low-rank update, which is folded into the matrix from time to time."""

    def __init__(self, fan_in, fan_out, rank=2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in) / math.sqrt(fan_in), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(fan_out))
        self.down = nn.Parameter(torch.randn(rank, fan_in) / math.sqrt(fan_in))
        self.up = nn.Parameter(torch.zeros(fan_out, rank))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.down), self.up)


@torch.no_grad()
def fold_and_restart(model, opt, seed):
    """Folds all low-rank updates into the frozen weights, draws new directions, and forgets the moments
    of the low-rank factors (those of the other parameters stay)."""
    g = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if not isinstance(layer, ReLoRALinear):
            continue
        w = layer.weight
        product = layer.up.full_tensor() @ layer.down.full_tensor()
        w.add_(distribute_tensor(product, w.device_mesh, w.placements, src_data_rank=None))
        fresh = torch.randn(layer.down.shape, generator=g) / math.sqrt(layer.down.shape[1])
        layer.down.copy_(distribute_tensor(fresh, layer.down.device_mesh, layer.down.placements, src_data_rank=None))
        layer.up.zero_()
        for p in (layer.down, layer.up):
            for value in opt.state[p].values():
                value.zero_()


def jagged_lr(step, cycle, warmup, total):
    """Cosine over the whole training with a short warm-up after each restart."""
    base = 0.1 + 0.45 * (1 + math.cos(math.pi * step / total))
    return base * min(1.0, (step % cycle + 1) / warmup)
