import torch


class LoggedTransitions:
    """A noisy controller on a double integrator, logged once."""

    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.obs = torch.randn(size, 4, generator=g)
        self.act = (-0.5 * self.obs[:, :2] - 0.3 * self.obs[:, 2:] + 0.5 * torch.randn(size, 2, generator=g)).clamp(-1, 1)
        vel = self.obs[:, 2:] + 0.3 * self.act
        self.next = torch.cat([self.obs[:, :2] + 0.3 * vel, vel], 1)
        self.rew = -(self.next.pow(2).sum(1) + 0.1 * self.act.pow(2).sum(1))

    def sample(self, step, n):
        g = torch.Generator().manual_seed(step)
        i = torch.randint(0, len(self.obs), (n,), generator=g)
        noise = (0.2 * torch.randn(n, 2, generator=g)).clamp(-0.4, 0.4)
        return self.obs[i], self.act[i], self.rew[i], self.next[i], noise
