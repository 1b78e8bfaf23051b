import torch

from moe import MoELayer


class BiasBalancer:
    """Loss-free balancing: after each step the bias of overloaded experts goes down and that of idle ones up."""

    def __init__(self, model, rate):
        self.layers = [m for m in model.modules() if isinstance(m, MoELayer)]
        self.rate = rate

    @torch.no_grad()
    def after_step(self):
        spread = []
        for layer in self.layers:
            load = layer.load
            layer.select_bias += self.rate * torch.sign(load.mean() - load)
            spread.append((load.max() / load.mean()).item())
            layer.load.zero_()
        return max(spread)
