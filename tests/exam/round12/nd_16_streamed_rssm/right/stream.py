"""Endless experience of a few environments, read in order, chunk after chunk."""
import torch


class Stream:
    def __init__(self, envs=16, length=400, dim=6, act=2, seed=61):
        g = torch.Generator().manual_seed(seed)
        rot = torch.linalg.qr(torch.randn(dim, dim, generator=g))[0]
        push = 0.5 * torch.randn(act, dim, generator=g)
        self.act = torch.randn(length, envs, act, generator=g)
        # episodes end at random; the first observation of an episode is drawn afresh and is not scored
        self.first = torch.rand(length, envs, generator=g) < 0.12
        self.first[0] = True
        obs, state = [], torch.zeros(envs, dim)
        for t in range(length):
            fresh = torch.randn(envs, dim, generator=g)
            state = torch.where(self.first[t][:, None], fresh, torch.tanh(1.5 * state @ rot + self.act[t] @ push))
            obs.append(state)
        self.obs = torch.stack(obs)
        self.envs, self.length = envs, length

    def chunk(self, index, size):
        """Time-major pieces of all environments."""
        t = slice(index * size, (index + 1) * size)
        return self.obs[t], self.act[t], self.first[t]
