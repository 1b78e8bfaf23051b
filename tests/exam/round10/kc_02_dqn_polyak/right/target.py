import copy

import torch
from torch.distributed.tensor import DTensor


class PolyakTarget:
    """A replicated, slowly moving copy of the online network for the bootstrap values."""

    def __init__(self, online, tau):
        self.net = copy.deepcopy(online).requires_grad_(False)
        self.tau = tau
        self.source = None

    def follow(self, online):
        self.source = list(online.parameters())

    @torch.no_grad()
    def update(self):
        for slow, fast in zip(self.net.parameters(), self.source):
            if isinstance(fast, DTensor):
                fast = fast.full_tensor()
            slow.lerp_(fast, self.tau)
