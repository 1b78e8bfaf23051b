"""Draws samples in proportion to a tempered running loss and corrects the bias with importance weights."""
import torch
import torch.distributed as dist


class LossSampler:
    def __init__(self, n, seed, smooth=0.7, floor=0.2):
        self.table = torch.full((n,), 3.0)
        self.smooth, self.floor = smooth, floor
        self.rng = torch.Generator().manual_seed(seed)

    def draw(self, batch, rank, world):
        """This rank's indices and weights out of one global draw, the same on all ranks."""
        n = len(self.table)
        p = self.table / self.table.sum()
        p = (1 - self.floor) * p + self.floor / n
        idx = torch.multinomial(p.double(), batch, replacement=False, generator=self.rng)
        weight = 1.0 / (n * p[idx])
        weight = weight / weight.mean()
        return idx[rank::world], weight[rank::world]

    def update(self, idx, losses):
        """Every rank reports its samples; afterwards all tables are equal again."""
        fresh = torch.zeros_like(self.table)
        seen = torch.zeros_like(self.table)
        fresh[idx] = losses
        seen[idx] = 1.0
        both = torch.stack([fresh, seen])
        dist.all_reduce(both)
        fresh, seen = both
        mixed = self.smooth * self.table + (1 - self.smooth) * fresh
        self.table = torch.where(seen > 0, mixed, self.table)

    def state_dict(self):
        return {"table": self.table, "rng": self.rng.get_state()}

    def load_state_dict(self, state):
        self.table = state["table"]
        self.rng.set_state(state["rng"])
