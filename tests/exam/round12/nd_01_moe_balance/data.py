"""Logged state/action pairs of several feedback controllers that share one plant."""
import torch


class ControllerLog:
    def __init__(self, size=2048, obs_dim=12, act_dim=4, modes=6, seed=11):
        g = torch.Generator().manual_seed(seed)
        gains = torch.randn(modes, obs_dim, act_dim, generator=g) / obs_dim ** 0.5
        selector = torch.randn(obs_dim, modes, generator=g)
        skew = torch.linspace(1.5, -1.5, modes)
        self.obs = torch.randn(size, obs_dim, generator=g)
        mode = (self.obs @ selector + skew).argmax(-1)
        self.act = torch.tanh(torch.einsum("no,noa->na", self.obs, gains[mode]))
        # the plant drifts along the log: late entries come from another operating point
        self.order = (self.obs @ selector[:, 0]).argsort()

    def window(self, step, size, rank, world):
        """Global window of ``size`` consecutive entries; every rank takes its contiguous part."""
        start = (step * 160) % (len(self.order) - size)
        idx = self.order[start:start + size].chunk(world)[rank]
        return self.obs[idx], self.act[idx]
