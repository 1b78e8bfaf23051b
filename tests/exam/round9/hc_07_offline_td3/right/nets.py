import torch
import torch.nn as nn


def mlp(sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Critic(nn.Module):
    def __init__(self, obs, act, width=48):
        super().__init__()
        self.q1 = mlp([obs + act, width, width, 1])
        self.q2 = mlp([obs + act, width, width, 1])

    def forward(self, o, a):
        x = torch.cat([o, a], -1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class Actor(nn.Module):
    def __init__(self, obs, act, width=48):
        super().__init__()
        self.body = mlp([obs, width, width, act])

    def forward(self, o):
        return torch.tanh(self.body(o))
