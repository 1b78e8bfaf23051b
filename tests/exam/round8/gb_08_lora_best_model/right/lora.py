import torch
import torch.nn as nn


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features ** 0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank
        for p in self.base.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.t()) @ self.b.t()


class Encoder(nn.Module):
    def __init__(self, n_in=20, width=64, depth=3, classes=5):
        super().__init__()
        dims = [n_in] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(dims[:-1], dims[1:]))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def add_lora(model, rank=4):
    for i, layer in enumerate(model.layers):
        model.layers[i] = LoRALinear(layer, rank)
    return model


def adapter_parameters(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}
