import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    """Frozen dense weight plus a trainable low-rank update, scaled as in rsLoRA."""

    def __init__(self, n_in, n_out, rank, alpha):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) / math.sqrt(n_in), requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(rank, n_in) / math.sqrt(n_in))
        self.lora_b = nn.Parameter(torch.zeros(n_out, rank))
        self.scale = alpha / math.sqrt(rank)

    def forward(self, x):
        return F.linear(x, self.weight) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def adapters(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def freeze_base(model):
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
