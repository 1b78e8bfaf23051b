import math

import torch


@torch.no_grad()
def copy_params(src, dst):
    for s, d in zip(src.parameters(), dst.parameters()):
        d.copy_(s)


@torch.no_grad()
def ema_update(src, dst, tau):
    for s, d in zip(src.parameters(), dst.parameters()):
        d.lerp_(s, 1.0 - tau)


def tau_at(step, total, base=0.97):
    return 1 - (1 - base) * (math.cos(math.pi * step / total) + 1) / 2
