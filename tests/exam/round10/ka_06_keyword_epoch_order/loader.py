import torch


class ShardedLoader:
    """Endless loader: every epoch is shuffled anew and dealt out to the ranks in turn."""

    def __init__(self, feats, labels, batch, rank, world, seed):
        self.feats, self.labels, self.batch = feats, labels, batch
        self.rank, self.world, self.seed = rank, world, seed
        self.epoch, self.position = 0, 0
        self.order = None

    def shuffle(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.labels), generator=g)
        self.order = order[self.rank :: self.world]

    def next(self):
        if self.order is None:
            self.shuffle()
        if self.position + self.batch > len(self.order):
            self.epoch += 1
            self.position = 0
            self.shuffle()
        idx = self.order[self.position : self.position + self.batch]
        self.position += self.batch
        return self.feats[idx], self.labels[idx]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position, "order": self.order}

    def load_state_dict(self, state):
        self.epoch, self.position, self.order = state["epoch"], state["position"], state["order"]
