import torch.nn as nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


class ActorCritic(nn.Module):
    """Shared body, two heads. The two methods are called from outside instead of forward."""

    def __init__(self, obs=5, actions=3, dim=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Tanh())
        self.actor = nn.Linear(dim, actions, bias=False)
        self.critic = nn.Linear(dim, 1, bias=False)

    def logits(self, obs):
        return self.actor(self.body(obs))

    def value(self, obs, frozen_body=True):
        h = self.body(obs)
        return self.critic(h.detach() if frozen_body else h).sum(-1)


def shard(net):
    fully_shard(net.body)
    fully_shard(net, reshard_after_forward=True)
    for name in ("logits", "value"):
        register_fsdp_forward_method(net, name)
    return net
