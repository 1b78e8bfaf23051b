import torch


class EpochSampler:
    """Endless, resumable sampler: every epoch visits the data set in a new order, the ranks share out each batch."""

    def __init__(self, length, batch, rank, world, seed=0):
        assert batch % world == 0
        self.length, self.batch = length, batch
        self.rank, self.world, self.seed = rank, world, seed
        self.epoch, self.cursor = 0, 0
        self._shuffle()

    def _shuffle(self):
        g = torch.Generator()
        g.manual_seed(self.seed + 1000 * self.epoch)
        self.order = torch.randperm(self.length, generator=g)

    def next(self):
        if self.cursor + self.batch > self.length:
            self.epoch, self.cursor = self.epoch + 1, 0
            self._shuffle()
        taken = self.order[self.cursor:self.cursor + self.batch][self.rank::self.world]
        self.cursor += self.batch
        return taken

    def state_dict(self):
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state):
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self._shuffle()
