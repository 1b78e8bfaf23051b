import torch
import torch.nn as nn


class LoraLayer(nn.Module):
    """rank-stabilised LoRA (scale alpha / sqrt(r))"""

    def __init__(self, linear, r, alpha, dropout):
        super().__init__()
        self.linear, self.r, self.alpha = linear, r, alpha
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(linear.in_features, r, bias=False)
        self.up = nn.Linear(r, linear.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=r**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(self.drop(x))) * (self.alpha / self.r**0.5)


def inject(model, names, r, alpha, dropout=0.0):
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path.rsplit(".", 1)[-1] in names:
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rsplit(".", 1)[-1], LoraLayer(module, r, alpha, dropout))
    return model
