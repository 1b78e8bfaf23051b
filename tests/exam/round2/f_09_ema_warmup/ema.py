"""Exponential moving average with the usual warm-up of the decay."""

import torch
from torch.distributed.tensor import distribute_tensor


class WeightAverage:
    def __init__(self, model, decay=0.99):
        self.model, self.decay, self.updates = model, decay, 0
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        self.updates += 1
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for n, p in self.model.named_parameters():
            self.shadow[n].lerp_(p.detach(), 1 - d)

    def full(self):
        return {n: v.full_tensor().cpu() for n, v in self.shadow.items()}

    def state_dict(self):
        return {"shadow": self.full(), "updates": self.updates}

    def load_state_dict(self, sd):
        self.updates = sd["updates"]
        for n, v in self.shadow.items():
            v.copy_(distribute_tensor(sd["shadow"][n], v.device_mesh, v.placements))
