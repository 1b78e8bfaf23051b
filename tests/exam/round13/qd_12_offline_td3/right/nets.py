import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class Actor(nn.Module):
    def __init__(self, obs, act, width):
        super().__init__()
        self.net = mlp(obs, width, act)

    def forward(self, obs):
        return torch.tanh(self.net(obs))


class TwinCritic(nn.Module):
    def __init__(self, obs, act, width):
        super().__init__()
        self.q1, self.q2 = mlp(obs + act, width, 1), mlp(obs + act, width, 1)

    def forward(self, obs, act):
        x = torch.cat([obs, act], -1)
        return torch.cat([self.q1(x), self.q2(x)], -1)


def sharded(net):
    return fully_shard(net, reshard_after_forward=True)


@torch.no_grad()
def polyak(target, online, tau):
    """Shard by shard: both have the same layout."""
    for t, o in zip(target.parameters(), online.parameters()):
        t.to_local().lerp_(o.to_local(), tau)
