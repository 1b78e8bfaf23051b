import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0):
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        self.bias = nn.Parameter(base.bias.detach().clone(), requires_grad=False)
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_adapters(model, rank=4):
    """Freezes the model and puts an adapter on every linear layer of its blocks."""
    for p in model.parameters():
        p.requires_grad_(False)
    for block in model.blocks:
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, LoRALinear(child, rank))
    return model


def adapter_state(full):
    return {k: v for k, v in full.items() if "lora_" in k}
