import torch, torch.nn as nn


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=16):
        super().__init__()
        self.base, self.r, self.scale = base, r, alpha / r
        base.weight.requires_grad_(False)
        if base.bias is not None:
            base.bias.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(r, base.in_features) * 0.05)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + (x @ self.lora_a.t()) @ self.lora_b.t() * self.scale


def add_lora(model, names=("qkv", "proj", "up", "down"), r=4, alpha=16):
    for p in model.parameters():
        p.requires_grad_(False)
    for mod in list(model.modules()):
        for n, child in list(mod.named_children()):
            if n in names and isinstance(child, nn.Linear):
                setattr(mod, n, LoRALinear(child, r, alpha))
    return model
