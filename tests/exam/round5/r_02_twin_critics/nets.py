import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

STATE, ACTION = 6, 2


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class Actor(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = mlp(STATE, hidden, ACTION)

    def forward(self, s):
        return torch.tanh(self.net(s))


class Critic(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = mlp(STATE + ACTION, hidden, 1)

    def forward(self, s, a):
        return self.net(torch.cat([s, a], -1)).squeeze(-1)


def make(kind, seed):
    torch.manual_seed(seed)
    net = kind()
    fully_shard(net.net[2])
    return fully_shard(net, reshard_after_forward=True)
