import torch


class Interactions:
    """Users and items live in hidden groups; a user mostly clicks items of the own group."""

    def __init__(self, n_users=192, n_items=128, per_user=8, groups=8, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.n_users, self.n_items = n_users, n_items
        ug = torch.randint(groups, (n_users,), generator=g)
        ig = torch.randint(groups, (n_items,), generator=g)
        affinity = (ug[:, None] == ig[None, :]).float() * 6 + 0.2
        self.items = torch.multinomial(affinity, per_user + 1, generator=g)
        self.train = torch.stack([
            torch.arange(n_users).repeat_interleave(per_user),
            self.items[:, :per_user].reshape(-1),
        ], dim=1)
        self.held_out = self.items[:, per_user]

    def batches(self, epoch, batch_size, seed):
        g = torch.Generator().manual_seed(seed * 1000 + epoch)
        order = torch.randperm(len(self.train), generator=g)
        for lo in range(0, len(order) - batch_size + 1, batch_size):
            rows = self.train[order[lo:lo + batch_size]]
            neg = torch.randint(self.n_items, (batch_size,), generator=g)
            yield rows[:, 0], rows[:, 1], neg
