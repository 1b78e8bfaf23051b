"""A vectorised point-mass environment: push the mass to the origin. All envs of the job are one global list; a rank owns a slice."""
import torch


class PointMass:
    def __init__(self, n_envs, rank, world, seed=3):
        self.n = n_envs
        self.gen = torch.Generator().manual_seed(seed)
        k = n_envs // world
        self.sl = slice(rank * k, (rank + 1) * k)
        # half of the envs are heavy and start far away
        self.mass = torch.linspace(0.5, 4.0, n_envs)[self.sl]
        self.scale = torch.linspace(1.0, 6.0, n_envs)[self.sl]
        self.reset()

    def reset(self):
        start = torch.randn(self.n, 2, generator=self.gen)[self.sl]
        self.pos = start * self.scale.unsqueeze(1)
        self.vel = torch.zeros_like(self.pos)
        return self.obs()

    def obs(self):
        return torch.cat([self.pos, self.vel, self.mass.unsqueeze(1)], dim=1)

    def noise(self):
        """Exploration noise for the local envs, drawn for all of them so that it does not depend on the number of ranks."""
        return torch.randn(self.n, 2, generator=self.gen)[self.sl]

    def step(self, action):
        self.vel = 0.9 * self.vel + 0.3 * action.clamp(-3, 3) / self.mass.unsqueeze(1)
        self.pos = self.pos + 0.3 * self.vel
        reward = -0.1 * self.pos.pow(2).sum(1).sqrt() - 0.01 * action.pow(2).sum(1)
        return self.obs(), reward
