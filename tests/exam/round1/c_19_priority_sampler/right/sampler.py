import torch
import torch.distributed as dist


class LossPrioritySampler:
    """Draws samples in proportion to their last known loss.

    The table of losses is replicated: every rank holds the losses of all samples, because the ranks exchange
    what they measured. The draw uses one generator that all ranks advance together; its state is saved.
    """

    def __init__(self, size, batch, seed=0, smoothing=0.3):
        self.score = torch.ones(size)
        self.batch, self.smoothing = batch, smoothing
        self.gen = torch.Generator().manual_seed(seed)

    def draw(self):
        prob = self.score / self.score.sum()
        ids = torch.multinomial(prob, self.batch, replacement=True, generator=self.gen)
        # importance weights make the weighted mean an unbiased estimate of the plain mean loss
        weight = 1.0 / (len(prob) * prob[ids])
        return ids, weight

    def report(self, ids, losses, rank, world):
        """ids: of the global batch; losses: of this rank's part of it (rank::world)."""
        table = torch.zeros(len(ids))
        table[rank::world] = losses
        dist.all_reduce(table)
        seen = torch.zeros_like(self.score).index_add_(0, ids, table)
        count = torch.zeros_like(self.score).index_add_(0, ids, torch.ones(len(ids)))
        hit = count > 0
        mean = seen[hit] / count[hit]
        self.score[hit] = (1 - self.smoothing) * self.score[hit] + self.smoothing * mean.clamp(0.05, 5.0)

    def state_dict(self):
        return {"score": self.score, "gen": self.gen.get_state()}

    def load_state_dict(self, state):
        self.score.copy_(state["score"])
        self.gen.set_state(state["gen"])
