"""A batch of corridor walks of different length; an episode ends at the goal or in the pit."""
import torch


class CorridorBatch:
    def __init__(self, episode_ids, iteration, seed, horizon):
        self.horizon = horizon
        n = len(episode_ids)
        self.uniforms = torch.empty(n, horizon)
        self.length = torch.empty(n)
        self.pos = torch.empty(n)
        self.wind = torch.empty(n, horizon)
        for row, episode in enumerate(episode_ids):
            gen = torch.Generator().manual_seed(seed * 1_000_003 + iteration * 1009 + episode)
            # even lanes are short corridors, odd ones long
            self.length[row] = 3.0 + 9.0 * (episode % 2) + torch.rand((), generator=gen)
            self.pos[row] = 0.0
            self.uniforms[row] = torch.rand(horizon, generator=gen)
            self.wind[row] = 0.3 * torch.randn(horizon, generator=gen)
        self.alive = torch.ones(n, dtype=torch.bool)

    def observe(self, t):
        left = (self.length - self.pos) / 10.0
        clock = torch.full_like(left, t / self.horizon)
        return torch.stack([self.pos / 10.0, left, clock, self.wind[:, t]], dim=1)

    def step(self, action, t):
        """action 0: back, 1: stay, 2: forward.  Returns reward and the mask of walks that were alive."""
        was_alive = self.alive.clone()
        move = action.float() - 1.0 + self.wind[:, t]
        self.pos = torch.where(was_alive, self.pos + move, self.pos)
        goal = was_alive & (self.pos >= self.length)
        pit = was_alive & (self.pos < -2.0)
        reward = goal.float() * 2.0 - pit.float() * 2.0 - 0.05 * was_alive.float()
        self.alive = was_alive & ~goal & ~pit
        return reward, was_alive
