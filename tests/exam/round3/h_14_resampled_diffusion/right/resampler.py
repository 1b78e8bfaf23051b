import torch
import torch.distributed as dist


class LossAware:
    """Importance sampling of timesteps by a running second moment of the loss, the same on all ranks."""

    def __init__(self, T, decay=0.8, floor=0.2):
        self.moment, self.decay, self.floor = torch.ones(T, dtype=torch.float64), decay, floor

    def probs(self):
        p = self.moment.sqrt()
        return (1 - self.floor) * p / p.sum() + self.floor / len(p)

    def sample(self, n, gen):
        p = self.probs()
        t = torch.multinomial(p, n, replacement=True, generator=gen)
        return t, (1 / (len(p) * p[t])).float()

    def update(self, t, losses):
        acc = torch.zeros(2, len(self.moment), dtype=torch.float64)
        acc[0].index_add_(0, t, losses.detach().double() ** 2)
        acc[1].index_add_(0, t, torch.ones(len(t), dtype=torch.float64))
        dist.all_reduce(acc)
        seen = acc[1] > 0
        new = acc[0][seen] / acc[1][seen]
        self.moment[seen] = self.decay * self.moment[seen] + (1 - self.decay) * new
