import torch
import torch.nn as nn


class MultiAdapter(nn.Module):
    """a frozen linear layer with one low-rank adapter per task; `active` names the one in use"""

    def __init__(self, linear, tasks, r):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.ParameterDict({t: nn.Parameter(torch.randn(r, linear.in_features) / r) for t in tasks})
        self.up = nn.ParameterDict({t: nn.Parameter(torch.zeros(linear.out_features, r)) for t in tasks})
        self.active = None

    def forward(self, x):
        y = self.linear(x)
        if self.active is None:
            return y
        return y + 2.0 * (x @ self.down[self.active].t()) @ self.up[self.active].t()


def select(model, task):
    for module in model.modules():
        if isinstance(module, MultiAdapter):
            module.active = task


def parameters_of(model, task):
    return {n: p for n, p in model.named_parameters() if n.endswith((f".down.{task}", f".up.{task}"))}
