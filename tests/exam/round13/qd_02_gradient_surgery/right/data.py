"""Three synthetic property-prediction tasks on the same descriptors; two of them pull against each other."""
import torch

TASKS = ("solubility", "toxicity", "affinity")


class Properties:
    def __init__(self, in_dim, seed):
        g = torch.Generator().manual_seed(seed)
        base = torch.randn(in_dim, generator=g)
        self.w = {
            "solubility": base + 0.3 * torch.randn(in_dim, generator=g),
            "toxicity": -2.0 * base + 0.3 * torch.randn(in_dim, generator=g),
            "affinity": torch.randn(in_dim, generator=g),
        }
        self.in_dim, self.seed = in_dim, seed

    def batch(self, step, task, size, rank, world):
        g = torch.Generator().manual_seed(self.seed + 7919 * step + TASKS.index(task))
        x = torch.randn(size, self.in_dim, generator=g)
        y = torch.tanh(x @ self.w[task] / self.in_dim**0.5) + 0.5 * torch.sin(x[:, 0] * (1 + TASKS.index(task)))
        return x[rank::world], y[rank::world, None]
