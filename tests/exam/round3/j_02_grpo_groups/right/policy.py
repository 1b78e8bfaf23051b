import torch
import torch.nn as nn
import torch.nn.functional as F

from task import DIM, LENGTH, TOKENS


class Policy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(DIM, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.out = nn.Linear(width, LENGTH * TOKENS)

    def forward(self, prompt):
        return self.out(self.body(prompt)).view(-1, LENGTH, TOKENS)


def logp_of(logits, answer):
    return F.log_softmax(logits, -1).gather(-1, answer[..., None]).squeeze(-1).sum(-1)


def sample(logits, uniform):
    gumbel = -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))
    return (logits + gumbel).argmax(-1)
