"""One module, three entrances: act, evaluate and value are registered as forward methods of FSDP."""

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


class Agent(nn.Module):
    def __init__(self, obs, actions, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi = nn.Linear(width, actions)
        self.v = nn.Linear(width, 1)

    def forward(self, obs):
        raise RuntimeError("use act, evaluate or value")

    @torch.no_grad()
    def act(self, obs, gumbel):
        h = self.trunk(obs)
        logits = self.pi(h)
        action = (logits + gumbel).argmax(-1)
        logp = logits.log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        return action, logp, self.v(h).squeeze(-1)

    def evaluate(self, obs, action):
        h = self.trunk(obs)
        logp = self.pi(h).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(1, action[:, None]).squeeze(1), entropy, self.v(h).squeeze(-1)

    @torch.no_grad()
    def value(self, obs):
        return self.v(self.trunk(obs)).squeeze(-1)


def make_agent(obs, actions):
    torch.manual_seed(42)
    agent = Agent(obs, actions)
    fully_shard(agent)
    for name in ("act", "evaluate", "value"):
        register_fsdp_forward_method(agent, name)
    return agent
