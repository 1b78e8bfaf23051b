import torch


class Stream:
    """an endless stream with its own position, so that it can be saved"""

    def __init__(self, batch, rank, world):
        self.batch, self.rank, self.world = batch, rank, world
        self.gen = torch.Generator().manual_seed(808)

    def __iter__(self):
        return self

    def __next__(self):  # every rank draws the whole batch and keeps its part
        x = torch.randn(self.batch, 8, generator=self.gen)
        y = (x[:, 0] > x[:, 1]).long() + 2 * (x[:, 2] + x[:, 3] > 0).long()
        return x.chunk(self.world)[self.rank], y.chunk(self.world)[self.rank]

    def state_dict(self):
        return {"gen": self.gen.get_state()}

    def load_state_dict(self, sd):
        self.gen.set_state(sd["gen"])
