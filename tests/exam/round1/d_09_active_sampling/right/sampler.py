"""Draws rows in proportion to the last loss seen for them."""

import torch
import torch.distributed as dist


class LossSampler:
    """`scores` is the table that all ranks draw from; `fresh` holds the losses that this rank has seen
    since the last refresh (-1: none)."""

    def __init__(self, n, batch, refresh, seed):
        self.scores = torch.full((n,), 1.0)
        self.fresh = torch.full((n,), -1.0)
        self.batch, self.refresh, self.seed = batch, refresh, seed

    def draw(self, step, rank, world):
        g = torch.Generator().manual_seed(self.seed + step)
        weights = self.scores.clamp_min(0.02) ** 0.7
        rows = torch.multinomial(weights.double(), self.batch, replacement=False, generator=g)
        p = weights / weights.sum()
        rows = rows[rank::world]
        importance = (1.0 / (len(weights) * p[rows])).sqrt()
        return rows, importance

    def observe(self, rows, losses):
        self.fresh[rows] = torch.maximum(self.fresh[rows], losses.detach())

    def _merge(self):
        # several ranks may have met the same row: the largest loss counts
        dist.all_reduce(self.fresh, op=dist.ReduceOp.MAX)

    def end_of_step(self, step):
        if (step + 1) % self.refresh == 0:
            self._merge()
            seen = self.fresh >= 0
            self.scores = torch.where(seen, self.fresh, self.scores)
            self.fresh.fill_(-1.0)

    def state_dict(self):
        self._merge()
        return {"scores": self.scores.clone(), "fresh": self.fresh.clone(), "seed": self.seed}

    def load_state_dict(self, state):
        self.scores, self.fresh = state["scores"].clone(), state["fresh"].clone()
        self.seed = state["seed"]
