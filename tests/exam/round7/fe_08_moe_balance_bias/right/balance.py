import torch
import torch.distributed as dist

from moe import MoE


class BiasBalancer:
    """After each step moves the routing bias against the load of the step."""

    def __init__(self, model, speed):
        self.layers = [m for m in model.modules() if isinstance(m, MoE)]
        self.speed = speed

    @torch.no_grad()
    def step(self):
        for layer in self.layers:
            load = layer.load.clone()
            dist.all_reduce(load)
            layer.bias += self.speed * torch.sign(load.mean() - load)
            layer.load.zero_()
