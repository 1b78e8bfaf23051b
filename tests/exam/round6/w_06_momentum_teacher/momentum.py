import copy

import torch
from torch.distributed.fsdp import fully_shard


class MomentumEncoder:
    """The slowly moving copy that produces the keys. It is sharded like the encoder it follows."""

    def __init__(self, encoder, momentum=0.9):
        self.momentum = momentum
        self.net = copy.deepcopy(encoder).requires_grad_(False)

    def shard_and_follow(self, encoder):
        for b in self.net.blocks:
            fully_shard(b)
        fully_shard(self.net, reshard_after_forward=True)
        self.pairs = list(zip(self.net.parameters(), encoder.parameters()))

    @torch.no_grad()
    def update(self):
        for slow, fast in self.pairs:
            slow.lerp_(fast, 1 - self.momentum)

    @torch.no_grad()
    def keys(self, x):
        return self.net(x)
