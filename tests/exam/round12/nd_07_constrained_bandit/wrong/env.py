"""Contextual dosing problem: every context has a best dose, every dose a cost (toxicity)."""
import torch


class Dosing:
    def __init__(self, context=10, doses=4, seed=33):
        g = torch.Generator().manual_seed(seed)
        self.best = 1.2 * torch.randn(context, doses, generator=g) / context ** 0.5
        self.tox = 0.5 + torch.rand(doses, generator=g)
        self.context = context

    def contexts(self, step, size):
        return torch.randn(size, self.context, generator=torch.Generator().manual_seed(4000 + step))

    def reward(self, x, dose):
        return 1.0 - (dose - torch.sigmoid(x @ self.best) - 0.8).pow(2).mean(-1)

    def cost(self, dose):
        return (dose.clamp_min(0) * self.tox).mean(-1)
