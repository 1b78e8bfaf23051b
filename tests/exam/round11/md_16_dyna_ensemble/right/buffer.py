import torch

from models import ACT, OBS


class ReplayBuffer:
    """Holds the transitions of all ranks, in the same order everywhere, with a bootstrap count for every
    member of the ensemble (Poisson(1), drawn once when the transition is added)."""

    def __init__(self, members, gen):
        self.members, self.gen = members, gen
        self.data = {"s": torch.empty(0, OBS), "a": torch.empty(0, ACT), "n": torch.empty(0, OBS), "w": torch.empty(0, members)}

    def add(self, s, a, n):
        w = torch.poisson(torch.ones(len(s), self.members), generator=self.gen)
        for key, new in zip("sanw", (s, a, n, w)):
            self.data[key] = torch.cat([self.data[key], new])

    def sample(self, size):
        rows = torch.randint(len(self.data["s"]), (size,), generator=self.gen)
        return [self.data[k][rows] for k in "sanw"]
