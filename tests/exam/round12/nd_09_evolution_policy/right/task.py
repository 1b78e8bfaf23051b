"""A point mass that must reach its goal: batch of initial states, differentiability not needed."""
import torch


class Reach:
    obs_dim, act_dim = 8, 4

    def __init__(self, starts=32, horizon=3, seed=2):
        g = torch.Generator().manual_seed(seed)
        self.start = torch.randn(starts, 4, generator=g)
        self.goal = torch.randn(starts, 4, generator=g)
        self.horizon = horizon

    def part(self, rank, world):
        return self.start.chunk(world)[rank], self.goal.chunk(world)[rank]

    def returns(self, policy, start, goal):
        pos, total = start, 0.0
        for _ in range(self.horizon):
            act = policy(torch.cat([pos, goal], -1))
            pos = pos + 0.5 * torch.tanh(act)
            total = total - (pos - goal).pow(2).mean(-1)
        return total / self.horizon
