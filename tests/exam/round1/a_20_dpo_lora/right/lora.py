from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    enabled = True  # one switch for all layers, see `reference`

    def __init__(self, base, r, alpha):
        super().__init__()
        self.base, self.scale = base, alpha / r
        self.a = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        y = self.base(x)
        return y + self.scale * F.linear(F.linear(x, self.a), self.b) if LoRALinear.enabled else y


@contextmanager
def reference():
    """Inside, every adapter is off: the model is the frozen reference model."""
    LoRALinear.enabled = False
    try:
        with torch.no_grad():
            yield
    finally:
        LoRALinear.enabled = True


def add_adapters(model, r=4, alpha=8):
    model.requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = LoRALinear(layer.up, r, alpha), LoRALinear(layer.down, r, alpha)
    return model


def merged(full, r=4, alpha=8):
    """A plain state dict, the adapters folded into the base weights; `full` is left as it is."""
    out = {}
    for name, t in full.items():
        if name.endswith((".a", ".b")):
            continue
        stem = name.rsplit(".base.", 1)[0]
        if name.endswith(".base.weight"):
            t = t + (alpha / r) * full[stem + ".b"] @ full[stem + ".a"]
        out[name.replace(".base.", ".")] = t.clone()
    return out
