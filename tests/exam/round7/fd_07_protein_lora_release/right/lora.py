import math

import torch
from torch import nn


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank update."""

    def __init__(self, d_in, d_out, r=4, alpha=8.0):
        super().__init__()
        self.base = nn.Linear(d_in, d_out)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(r, d_in) / math.sqrt(d_in))
        self.lora_b = nn.Parameter(torch.zeros(d_out, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.lora_a.T @ self.lora_b.T) * self.scale


def lora_layers(model):
    return [m for m in model.modules() if isinstance(m, LoRALinear)]


@torch.no_grad()
def merge(model):
    """Fold the adapters into the base weights; returns what unmerge needs."""
    kept = []
    for m in lora_layers(model):
        kept.append(m.base.weight.detach().clone())
        m.base.weight.add_((m.lora_b @ m.lora_a) * m.scale)
    return kept


@torch.no_grad()
def unmerge(model, kept):
    for m, w in zip(lora_layers(model), kept):
        m.base.weight.copy_(w)
