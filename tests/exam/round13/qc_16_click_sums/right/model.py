import torch
import torch.nn.functional as F
from torch import nn

from sessions import PLACES


class ClickModel(nn.Module):
    """log P(click) = log P(looked at | place) + log P(good | features)"""

    def __init__(self, width=24):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(PLACES))
        self.good = nn.Sequential(nn.Linear(5, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, x):
        good = self.good(x.flatten(0, 1)).view(-1, PLACES)
        return F.logsigmoid(self.place) + F.logsigmoid(good)


def click_sum(log_p, shown, click):
    """Sum of the negative log likelihood over the results which were shown."""
    no = torch.log1p(-log_p.exp().clamp_max(1 - 1e-6))
    return -((click * log_p + (1 - click) * no) * shown).sum()
