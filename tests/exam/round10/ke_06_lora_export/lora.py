import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor


class LoRALinear(nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale = alpha / r

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


def add_lora(model, names, r=4, alpha=8):
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.split(".")[-1] in names:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.split(".")[-1], LoRALinear(module, r, alpha))
    return model


def lora_layers(model):
    return [(n, m) for n, m in model.named_modules() if isinstance(m, LoRALinear)]


def _full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


@torch.no_grad()
def merge(model):
    """Folds the adapters into the base weights and returns the base weights as they were."""
    base = {}
    for name, layer in lora_layers(model):
        base[name] = layer.weight.detach().clone()
        delta = _full(layer.lora_B) @ _full(layer.lora_A) * layer.scale
        if isinstance(layer.weight, DTensor):
            delta = distribute_tensor(delta, layer.weight.device_mesh, layer.weight.placements)
        layer.weight.add_(delta)
    return base


@torch.no_grad()
def restore(model, base):
    for name, layer in lora_layers(model):
        layer.weight.copy_(base[name])
