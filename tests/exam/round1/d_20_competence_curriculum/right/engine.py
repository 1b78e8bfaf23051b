"""The data engine: decides difficulty and batch size, deals the rows out and remembers where it is."""

import torch
import torch.distributed as dist


class Curriculum:
    def __init__(self, table, levels, base_batch, threshold):
        self.table, self.levels = table, levels
        self.base_batch, self.threshold = base_batch, threshold
        self.gen = torch.Generator().manual_seed(2020)
        self.level, self.drawn, self.smooth = 0, 0, 0.0

    def __iter__(self):
        return self

    def __next__(self):
        """A batch of the present level plus a quarter of earlier ones; the batch grows with the level."""
        size = self.base_batch + 8 * self.level
        pool = (self.table.level <= self.level).nonzero().flatten()
        top = (self.table.level == self.level).nonzero().flatten()
        old = size // 4
        # every rank draws the whole batch from the same generator and keeps its part; parts may be unequal
        rows = torch.cat(
            [
                top[torch.randint(0, len(top), (size - old,), generator=self.gen)],
                pool[torch.randint(0, len(pool), (old,), generator=self.gen)],
            ]
        )
        self.drawn += size
        return rows.tensor_split(dist.get_world_size())[dist.get_rank()], size

    def tell(self, right, size):
        """Counts of the whole batch: all ranks rise at the same step."""
        self.smooth = 0.6 * self.smooth + 0.4 * right / size
        if self.smooth > self.threshold and self.level + 1 < self.levels:
            self.level += 1
            self.smooth *= 0.5

    def state_dict(self):
        return {
            "gen": self.gen.get_state(),
            "place": torch.tensor([self.level, self.drawn]),
            "smooth": torch.tensor(self.smooth, dtype=torch.float64),
        }

    def load_state_dict(self, s):
        self.gen.set_state(s["gen"])
        self.level, self.drawn = s["place"].tolist()
        self.smooth = float(s["smooth"])
