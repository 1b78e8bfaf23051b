import torch


class Signals:
    def __init__(self, n=160, length=24, seed=41):
        g = torch.Generator().manual_seed(seed)
        f = torch.randint(1, 5, (n, 1), generator=g)
        self.t = torch.arange(length) / length * 6.2832
        self.x = torch.sin(f * self.t) + 0.1 * torch.randn(n, length, generator=g)

    def views(self, step, size, rank, world):
        g = torch.Generator().manual_seed(6000 + step)
        idx = torch.randperm(len(self.x), generator=g)[:size]
        out = []
        for _ in range(2):
            v = self.x[idx] * (0.7 + 0.6 * torch.rand(size, 1, generator=g)) + 0.2 * torch.randn(size, 24, generator=g)
            roll = int(torch.randint(0, 24, (), generator=g))
            out.append(v.roll(roll, 1).unsqueeze(1)[rank::world])
        return out
