import torch


class Family:
    """Tasks: linear-plus-bump regressions. The samples of a task are divided over the ranks."""

    def __init__(self, seed=40, d=4):
        self.seed, self.d = seed, d
        g = torch.Generator().manual_seed(seed)
        self.common = torch.randn(d, 1, generator=g)

    def task(self, number, support, query, rank, world):
        g = torch.Generator().manual_seed(self.seed * 10_007 + number)
        own = self.common + 0.5 * torch.randn(self.d, 1, generator=g)
        bump = torch.randn((), generator=g)
        x = torch.randn(support + query, self.d, generator=g)
        y = x @ own + bump * torch.tanh(x[:, :1] * x[:, 1:2])
        pick = lambda t: (t[:support].chunk(world)[rank], t[support:].chunk(world)[rank])
        (xs, xq), (ys, yq) = pick(x), pick(y)
        return (xs, ys), (xq, yq)
