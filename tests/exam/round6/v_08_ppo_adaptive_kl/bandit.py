import torch


class ContextualGame:
    """Contexts of two sorts: easy ones (one feature decides) and hard ones (a mixture decides)."""

    def __init__(self, features=8, actions=5, seed=31):
        g = torch.Generator().manual_seed(seed)
        self.features, self.actions = features, actions
        self.values = torch.randn(features, actions, generator=g)

    def contexts(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, self.features, generator=g)
        # traffic comes sorted by region: the second half of each batch has larger features
        x[n // 2 :] *= 2.5
        return x, torch.rand(n, generator=g)

    def reward(self, x, action):
        return torch.tanh(x @ self.values).gather(1, action[:, None]).squeeze(1)
