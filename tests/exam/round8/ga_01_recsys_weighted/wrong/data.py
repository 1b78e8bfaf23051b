import torch

N_USERS, N_ITEMS = 96, 120


class Interactions:
    """Synthetic watch log: (user, item, clicked, watch-time weight)."""

    def __init__(self, n=2048, seed=7):
        g = torch.Generator().manual_seed(seed)
        taste = torch.randn(N_USERS, 6, generator=g)
        topic = torch.randn(N_ITEMS, 6, generator=g)
        self.user = torch.randint(N_USERS, (n,), generator=g)
        self.item = torch.randint(N_ITEMS, (n,), generator=g)
        affinity = (taste[self.user] * topic[self.item]).sum(-1)
        self.label = (affinity + 0.5 * torch.randn(n, generator=g) > 0).float()
        # watch time is heavy tailed
        self.weight = torch.exp(1.3 * torch.randn(n, generator=g)) * (1 + self.label)

    def global_batch(self, step, size):
        g = torch.Generator().manual_seed(1000 + step)
        return torch.randint(len(self.user), (size,), generator=g)

    def take(self, idx):
        return self.user[idx], self.item[idx], self.label[idx], self.weight[idx]
