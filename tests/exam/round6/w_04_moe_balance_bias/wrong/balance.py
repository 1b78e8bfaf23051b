import torch

from moe import MoE


class LoadBalancer:
    """After each optimizer step, moves the bias of an expert against its excess load."""

    def __init__(self, model, rate=0.02):
        self.layers = [m for m in model.modules() if isinstance(m, MoE)]
        self.rate = rate
        self.violation = 0.0

    @torch.no_grad()
    def step(self):
        worst = []
        for layer in self.layers:
            load = layer.load
            layer.bias += self.rate * torch.sign(load.mean() - load)
            worst.append((load.max() / load.mean() - 1).item())
            layer.load.zero_()
        self.violation = max(worst)
