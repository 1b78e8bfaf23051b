import torch
import torch.nn as nn


class WeightAverage(nn.Module):
    """Equal-weight average of the weights of a model over the tail of training.

    `module` is a second model of the same sharding; it holds the average.
    """

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.module.requires_grad_(False)
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long))

    @torch.no_grad()
    def update_parameters(self, model):
        weight = 1.0 / (self.n_averaged.item() + 1)
        for a, p in zip(self.module.parameters(), model.parameters()):
            a.mul_(1.0 - weight).add_(p.detach(), alpha=weight)
        self.n_averaged += 1

    def forward(self, *args):
        return self.module(*args)
