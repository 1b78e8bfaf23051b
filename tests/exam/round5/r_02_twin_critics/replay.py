"""An offline replay buffer of a made-up control problem: move the state towards the origin."""
import torch

from nets import ACTION, STATE


class Replay:
    def __init__(self, n=1024, seed=3):
        g = torch.Generator().manual_seed(seed)
        mix = torch.randn(ACTION, STATE, generator=g) * 0.5
        self.s = torch.randn(n, STATE, generator=g)
        self.a = torch.rand(n, ACTION, generator=g) * 2 - 1
        self.s2 = 0.9 * self.s + self.a @ mix
        self.r = -self.s2.pow(2).mean(1) - 0.05 * self.a.pow(2).sum(1)

    def sample(self, step, global_batch, rank, world):
        g = torch.Generator().manual_seed(1000 + step)
        idx = torch.randint(0, len(self.s), (global_batch,), generator=g).chunk(world)[rank]
        return self.s[idx], self.a[idx], self.r[idx], self.s2[idx]
