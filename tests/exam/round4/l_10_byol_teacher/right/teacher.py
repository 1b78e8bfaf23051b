import copy

import torch
from torch.distributed.fsdp import fully_shard


def shard_vit(net, **kw):
    for layer in net.layers:
        fully_shard(layer, **kw)
    return fully_shard(net, **kw)


class Teacher:
    """Momentum copy of the student's backbone."""

    def __init__(self, net, momentum):
        self.momentum = momentum
        self.net = copy.deepcopy(net).requires_grad_(False).eval()
        shard_vit(self.net, reshard_after_forward=True)
        self.params = list(self.net.parameters())

    @torch.no_grad()
    def follow(self, student_params):
        torch._foreach_lerp_(self.params, [p.detach() for p in student_params], 1 - self.momentum)

    @torch.no_grad()
    def __call__(self, x):
        return self.net(x)
