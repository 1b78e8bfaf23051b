import torch


class ClickLog:
    """A fixed log of impressions, shuffled anew in every epoch."""

    def __init__(self, n=960, users=50, items=80, extra=4, seed=5):
        g = torch.Generator().manual_seed(seed)
        self.users, self.items = users, items
        self.user = torch.randint(users, (n,), generator=g)
        self.item = torch.randint(items, (n,), generator=g)
        uf = torch.randn(users, extra, generator=g)
        vf = torch.randn(items, extra, generator=g)
        self.user_feats, self.item_feats = uf[self.user], vf[self.item]
        affinity = (self.user_feats * self.item_feats).sum(-1)
        self.click = (torch.rand(n, generator=g) < torch.sigmoid(1.5 * affinity)).float()

    def batches(self, start_step, global_batch, rank, world):
        per_epoch = len(self.click) // global_batch
        step = start_step
        while True:
            epoch, pos = divmod(step, per_epoch)
            order = torch.randperm(len(self.click), generator=torch.Generator().manual_seed(900 + epoch))
            idx = order[pos * global_batch:(pos + 1) * global_batch].chunk(world)[rank]
            yield {k: getattr(self, k)[idx] for k in ("user", "item", "user_feats", "item_feats", "click")}
            step += 1
