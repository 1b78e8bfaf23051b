import torch
import torch.distributed as dist


class LossAwareSampler:
    """Draws the time of each sample with a probability that follows the recent losses.

    (0, 1) is cut into bins; the history holds the last losses of each bin over all ranks, so that all
    ranks have the same history and draw the same times for the global batch.
    """

    def __init__(self, bins=8, keep=6, floor=0.01):
        self.bins, self.keep, self.floor = bins, keep, floor
        self.history = torch.zeros(bins, keep, dtype=torch.float64)
        self.counts = torch.zeros(bins, dtype=torch.long)

    def probs(self):
        if (self.counts < self.keep).any():
            return torch.full((self.bins,), 1 / self.bins, dtype=torch.float64)
        w = self.history.square().mean(1).sqrt()
        w = w / w.sum()
        return w * (1 - self.floor) + self.floor / self.bins

    def draw(self, n, gen):
        p = self.probs()
        u = torch.rand(n, generator=gen, dtype=torch.float64)
        bins = torch.searchsorted(p.cumsum(0), u).clamp(max=self.bins - 1)
        t = (bins + torch.rand(n, generator=gen, dtype=torch.float64)) / self.bins
        weight = 1 / (self.bins * p[bins])  # keeps the expectation that of uniform times
        return t.float(), weight.float(), bins

    def record(self, n, rows, bins, losses):
        """rows: which rows of the global batch the local losses belong to; bins: of the global batch."""
        table = torch.zeros(n, dtype=torch.float64)
        table[rows] = losses.double()
        dist.all_reduce(table)
        for b, v in zip(bins.tolist(), table.tolist()):
            c = int(self.counts[b])
            if c < self.keep:
                self.history[b, c] = v
            else:
                self.history[b] = torch.cat([self.history[b, 1:], torch.tensor([v], dtype=torch.float64)])
            self.counts[b] = min(c + 1, self.keep)

    def state_dict(self):
        return {"history": self.history, "counts": self.counts}

    def load_state_dict(self, sd):
        self.history, self.counts = sd["history"], sd["counts"]
