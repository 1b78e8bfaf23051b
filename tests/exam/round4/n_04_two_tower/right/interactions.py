import torch


class Clicks:
    """(user, item) pairs: latent tastes, and items with very unequal popularity. Sessions are stored by region."""

    def __init__(self, users=96, items=160, pairs=2048, seed=4):
        g = torch.Generator().manual_seed(seed)
        taste = torch.randn(users, 6, generator=g)
        topic = torch.randn(items, 6, generator=g)
        bias = 1.5 * torch.randn(items, generator=g)
        self.users, self.items = users, items
        user = torch.randint(users, (pairs,), generator=g)
        region = (taste[user, 0] > 0).long()
        prob = (taste[user] @ topic.T + bias).softmax(1)
        item = torch.multinomial(prob, 1, generator=g).squeeze(1)
        self.groups = [torch.stack([user[region == r], item[region == r]], 1) for r in (0, 1)]

    def batch(self, step, size):
        """A global batch: first half from region 0, second half from region 1."""
        g = torch.Generator().manual_seed(7000 + step)
        return torch.cat([grp[torch.randint(len(grp), (size // 2,), generator=g)] for grp in self.groups])
