import torch

CLASSES = 3


class TaskMixture:
    """Tasks of the same inputs and different labelling rules; some are rare in the validation set."""

    def __init__(self, tasks, dim, seed):
        g = torch.Generator().manual_seed(seed)
        self.rules = torch.randn(tasks, dim, CLASSES, generator=g)
        self.tasks, self.dim, self.seed = tasks, dim, seed

    def draw(self, n, seed, odds=None):
        g = torch.Generator().manual_seed(self.seed + seed)
        t = torch.multinomial(torch.ones(self.tasks) if odds is None else odds, n, replacement=True, generator=g)
        x = torch.randn(n, self.dim, generator=g)
        y = torch.einsum("nd,ndc->nc", x, self.rules[t]).argmax(-1)
        return x, y, t
