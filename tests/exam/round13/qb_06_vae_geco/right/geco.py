"""Reconstruction as a constraint (Rezende and Viola 2018): the multiplier follows a moving average of rec - target."""
import math

import torch
import torch.distributed as dist


class Geco:
    def __init__(self, target, rate=0.01, momentum=0.95):
        self.target, self.rate, self.momentum = target, rate, momentum
        self.log_lambda = 1.0
        self.average = None

    def loss(self, rec, kl):
        return kl + math.exp(self.log_lambda) * (rec - self.target)

    def update(self, rec):
        gap = rec.detach().clone()
        dist.all_reduce(gap)
        gap = gap.item() / dist.get_world_size() - self.target
        self.average = gap if self.average is None else self.momentum * self.average + (1 - self.momentum) * gap
        self.log_lambda = min(max(self.log_lambda + self.rate * self.average, -5.0), 5.0)

    def state_dict(self):
        return {"log_lambda": self.log_lambda, "average": self.average}

    def load_state_dict(self, state):
        for name, value in state.items():
            setattr(self, name, value)
