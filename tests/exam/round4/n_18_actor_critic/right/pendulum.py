import torch


class Pendulums:
    """A batch of damped pendulums; the torque is one of three. `first` is the global number of the first one."""

    def __init__(self, n, first, seed):
        starts, self.luck = [], []
        for i in range(first, first + n):
            g = torch.Generator().manual_seed(seed * 4096 + i)
            starts.append(torch.randn(2, generator=g) * torch.tensor([1.0, 0.5]))
            self.luck.append(g)
        self.s = torch.stack(starts)

    def observe(self):
        return torch.stack([self.s[:, 0].cos(), self.s[:, 0].sin(), self.s[:, 1]], 1)

    def uniform(self):
        return torch.stack([torch.rand((), generator=g) for g in self.luck])

    def act(self, a):
        th, om = self.s.unbind(1)
        om = 0.95 * om + 0.2 * (torch.sin(th) * -1.0 + (a - 1.0) * 1.5)
        th = th + 0.2 * om
        self.s = torch.stack([th, om], 1)
        return th.cos() - 0.05 * om**2
