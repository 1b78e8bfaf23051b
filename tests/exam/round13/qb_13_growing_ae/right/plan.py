from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Plan:
    lengths: tuple = (8, 8, 8)  # steps per resolution
    fade_steps: int = 4

    @property
    def total(self):
        return sum(self.lengths)

    def at(self, step):
        """(level, fade) of a step."""
        level, begin = 0, 0
        while step >= begin + self.lengths[level]:
            begin += self.lengths[level]
            level += 1
        fade = 1.0 if level == 0 else min(1.0, (step - begin + 1) / self.fade_steps)
        return level, fade


def rings(step, batch, side):
    g = torch.Generator().manual_seed(step * 3 + 2)
    axis = torch.linspace(-1, 1, 16)
    c = torch.rand(batch, 2, generator=g) - 0.5
    r = 0.3 + 0.4 * torch.rand(batch, 1, 1, generator=g)
    d = ((axis[:, None] - c[:, 0, None, None]) ** 2 + (axis[None, :] - c[:, 1, None, None]) ** 2).sqrt()
    return F.adaptive_avg_pool2d(torch.exp(-30 * (d - r) ** 2).unsqueeze(1), side)
