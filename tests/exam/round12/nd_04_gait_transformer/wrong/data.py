"""Long demonstrations of a legged robot: the action depends on the observation and on the clock of the episode."""
import math

import torch


class Demonstrations:
    def __init__(self, episodes=64, length=1024, obs_dim=8, act_dim=4, period=7, seed=21):
        g = torch.Generator().manual_seed(seed)
        self.gain = torch.randn(obs_dim, act_dim, generator=g) / obs_dim
        self.phase = 6.28 * torch.rand(act_dim, generator=g)
        self.obs = torch.randn(episodes, length, obs_dim, generator=g)
        clock = torch.arange(length, dtype=torch.float32)[:, None] * (2 * math.pi / period)
        self.act = self.obs @ self.gain + torch.sin(clock + self.phase)

    def segments(self, seed, count, window, first=0, last=None):
        """(observations, step numbers, actions) of ``count`` random windows."""
        g = torch.Generator().manual_seed(seed)
        episode = torch.randint(self.obs.shape[0], (count, 1), generator=g)
        last = last or self.obs.shape[1] - window
        start = torch.randint(first, last, (count, 1), generator=g)
        step = start + torch.arange(window)
        return self.obs[episode, step], step, self.act[episode, step]
