import torch


class CartField:
    """Vectorized point-mass control: push the mass to the origin in a swirling field. Environments are independent."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.pos = torch.randn(n, 2, generator=g) * 2
        self.vel = torch.randn(n, 2, generator=g) * 0.3

    def observe(self):
        return torch.cat([3.0 + 2 * self.pos, 0.5 * self.vel], dim=1)

    def act(self, force):
        swirl = torch.stack([-self.pos[:, 1], self.pos[:, 0]], dim=1)
        self.vel = 0.9 * self.vel + 0.1 * (force.clamp(-2, 2) + 0.2 * swirl)
        self.pos = (self.pos + 0.3 * self.vel).clamp(-4, 4)
        return -(self.pos.square().sum(1)) * 0.1 - 0.01 * force.square().sum(1)
