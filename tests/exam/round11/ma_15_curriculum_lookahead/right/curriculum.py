import torch
import torch.distributed as dist


class LossTable:
    """Running loss of every training sentence; hard sentences are drawn more often. Equal on all ranks."""

    def __init__(self, n, seed):
        self.loss = torch.full((n,), 3.0)
        self.seen = torch.zeros(n, dtype=torch.long)
        self.rng = torch.Generator().manual_seed(seed)

    def draw(self, k):
        # rounded, so that rounding noise of the losses cannot turn one draw into another
        weights = (self.loss * 16).round().clamp(min=1.0)
        return torch.multinomial(weights, k, generator=self.rng)

    def record(self, idx, loss):
        """idx and loss are this rank's share of the batch."""
        fresh = torch.zeros(2, len(self.loss))
        fresh[0, idx] = loss
        fresh[1, idx] = 1.0
        dist.all_reduce(fresh)
        hit = fresh[1] > 0
        self.loss = torch.where(hit, 0.5 * self.loss + 0.5 * fresh[0], self.loss)
        self.seen += fresh[1].long()

    def state_dict(self):
        return {"loss": self.loss, "seen": self.seen, "rng": self.rng.get_state()}

    def load_state_dict(self, s):
        self.loss, self.seen = s["loss"].clone(), s["seen"].clone()
        self.rng.set_state(s["rng"])
