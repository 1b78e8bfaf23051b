import torch

ITEMS, TASTE = 80, 5


class ColdUsers:
    """Each task is a new user with a hidden taste: rated items to adapt on, further items to test on."""

    def __init__(self, seed=33):
        self.items = torch.randn(ITEMS, TASTE, generator=torch.Generator().manual_seed(seed))
        self.seed = seed

    def task(self, number, support=32, query=32):
        g = torch.Generator().manual_seed(self.seed * 100000 + number)
        common = torch.linspace(-1, 1, TASTE)
        taste = common + 0.6 * torch.randn(TASTE, generator=g)
        ids = torch.randperm(ITEMS, generator=g)[: support + query]
        y = torch.tanh(self.items[ids] @ taste) + 0.05 * torch.randn(len(ids), generator=g)
        return (ids[:support], y[:support]), (ids[support:], y[support:])
