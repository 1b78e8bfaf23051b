"""Logged contextual bandit data: contexts, chosen arms, propensities and rewards."""
from dataclasses import dataclass

import torch


@dataclass
class Log:
    ctx: torch.Tensor
    arm: torch.Tensor
    prop: torch.Tensor
    reward: torch.Tensor

    def __len__(self):
        return len(self.arm)

    def rows(self, idx):
        return Log(self.ctx[idx], self.arm[idx], self.prop[idx], self.reward[idx])


def make_logs(train=48, valid=256, dim=10, arms=5, seed=1):
    g = torch.Generator().manual_seed(seed)
    true = torch.randn(dim, arms, generator=g)
    logging = 0.5 * true + torch.randn(dim, arms, generator=g)

    def draw(n):
        ctx = torch.randn(n, dim, generator=g)
        probs = torch.softmax(ctx @ logging * 0.3, -1)
        arm = torch.multinomial(probs, 1, generator=g).squeeze(1)
        mean = torch.sigmoid((ctx @ true)[torch.arange(n), arm] - 0.5)
        reward = (torch.rand(n, generator=g) < mean).float()
        return Log(ctx, arm, probs[torch.arange(n), arm], reward)

    return draw(train), draw(valid)
