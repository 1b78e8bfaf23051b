"""The largest of a few digits; the level is the number of digits that are there."""

import torch


class Largest:
    classes, digits = 6, 4

    def __init__(self, n=900):
        g = torch.Generator().manual_seed(200)
        self.level = torch.randint(0, self.digits - 1, (n,), generator=g)
        self.x = torch.randint(1, self.classes + 1, (n, self.digits), generator=g)
        counts = torch.arange(self.digits)[None] <= self.level[:, None]
        self.x = torch.where(counts, self.x, 0)  # 0: no digit
        self.y = self.x.amax(1) - 1
