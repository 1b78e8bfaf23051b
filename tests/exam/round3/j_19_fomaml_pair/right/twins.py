"""A slow and a fast network of the same shape, sharded alike, so that shards can be copied one to one."""

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def _net(d, width):
    return nn.Sequential(
        nn.Linear(d, width), nn.Tanh(), nn.Sequential(nn.Linear(width, width), nn.Tanh()), nn.Linear(width, 1)
    )


class Twins:
    def __init__(self, d, width=24, seed=0):
        torch.manual_seed(seed)
        self.slow, self.fast = _net(d, width), _net(d, width)
        for net in (self.slow, self.fast):
            fully_shard(net[2])
            fully_shard(net)

    @torch.no_grad()
    def restart(self):
        for f, s in zip(self.fast.parameters(), self.slow.parameters()):
            f.copy_(s)
            f.grad = None

    @torch.no_grad()
    def descend(self, lr):
        for f in self.fast.parameters():
            f.sub_(lr * f.grad)
            f.grad = None

    @torch.no_grad()
    def hand_over(self, weight):
        """The fast network's gradient is the (first-order) gradient of the slow one."""
        for f, s in zip(self.fast.parameters(), self.slow.parameters()):
            g = f.grad * weight
            s.grad = g if s.grad is None else s.grad + g
            f.grad = None
