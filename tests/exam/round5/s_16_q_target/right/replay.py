import torch


class Replay:
    """transitions of a made-up control problem, logged once by a random behaviour policy"""

    def __init__(self, n=1024):
        g = torch.Generator().manual_seed(55)
        self.s = torch.randn(n, 6, generator=g)
        self.a = torch.randint(0, 3, (n,), generator=g)
        push = torch.zeros(n, 6)
        push[torch.arange(n), self.a] = 0.5
        self.s2 = 0.9 * self.s - push * self.s.sign() + 0.05 * torch.randn(n, 6, generator=g)
        self.r = -self.s2[:, :3].abs().sum(1)
        self.done = torch.rand(n, generator=g) < 0.1

    def sample(self, step, n, rank, world):
        rows = torch.randint(0, len(self.a), (n,), generator=torch.Generator().manual_seed(step))
        rows = rows[rank::world]
        return self.s[rows], self.a[rows], self.r[rows], self.s2[rows], self.done[rows].float()
