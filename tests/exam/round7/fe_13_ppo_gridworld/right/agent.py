import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class ActorCritic(nn.Module):
    def __init__(self, obs=50, hidden=64, actions=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.policy = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return torch.log_softmax(self.policy(h), dim=-1), self.value(h).squeeze(-1)


def build_agent(seed):
    torch.manual_seed(seed)
    agent = ActorCritic()
    fully_shard(agent.trunk)
    return fully_shard(agent)


class RunningScale:
    """Running variance of the returns over all ranks (Chan et al.), for scaling the value targets."""

    def __init__(self):
        self.count, self.mean, self.m2 = 1e-4, 0.0, 1e-4

    def update(self, count, mean, m2):
        delta = mean - self.mean
        total = self.count + count
        self.mean += delta * count / total
        self.m2 += m2 + delta ** 2 * self.count * count / total
        self.count = total

    @property
    def std(self):
        return max((self.m2 / self.count) ** 0.5, 1e-3)
