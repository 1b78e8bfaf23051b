"""Vectorised point-mass: push the point to the origin. Every environment has a global number, and its
start and its noise follow from (update, number) alone."""

import torch

OBS, ACT = 4, 2


class PointEnvs:
    def __init__(self, total, rank, world, seed=50):
        self.total, self.seed = total, seed
        self.mine = torch.arange(total).chunk(world)[rank]

    def _draw(self, update, kind, *shape):
        g = torch.Generator().manual_seed((self.seed + kind) * 1_000_003 + update)
        return torch.randn(self.total, *shape, generator=g)[self.mine]

    def reset(self, update):
        self.pos = 1.5 * self._draw(update, 0, 2)
        self.vel = 0.2 * self._draw(update, 1, 2)
        return self.observe()

    def observe(self):
        return torch.cat([self.pos, self.vel], 1)

    def action_noise(self, update, horizon):
        return self._draw(update, 2, horizon, ACT).unbind(1)

    def step(self, action):
        self.vel = 0.8 * self.vel + 0.3 * action.clamp(-2, 2)
        self.pos = self.pos + 0.5 * self.vel
        return self.observe(), -self.pos.square().sum(1).clamp(max=9.0) - 0.01 * action.square().sum(1)
