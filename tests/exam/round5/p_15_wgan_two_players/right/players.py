import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Gen(nn.Module):
    def __init__(self, z=4, h=24):
        super().__init__()
        self.inp = nn.Linear(z, h)
        self.mid = nn.Sequential(nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.out = nn.Linear(h, 2)

    def forward(self, z):
        return self.out(self.mid(self.inp(z)))


class Critic(nn.Module):
    def __init__(self, h=24):
        super().__init__()
        self.inp = nn.Linear(2, h)
        self.mid = nn.Sequential(nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2))
        self.out = nn.Linear(h, 1)

    def forward(self, x):
        return self.out(self.mid(self.inp(x))).mean()


def shard(net):
    fully_shard(net.mid)
    # forwards without a backward happen here, so the root is resharded after each forward
    return fully_shard(net, reshard_after_forward=True)
