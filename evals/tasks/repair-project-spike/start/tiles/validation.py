"""The error on held-out images, all of them once, however many ranks there are."""

from __future__ import annotations

import torch
from torch import nn

from . import comm
from .images import Hiding
from .meters import Mean


@torch.no_grad()
def validate(model: nn.Module, tiles: torch.Tensor, hiding: Hiding) -> dict[str, float]:
    """The same tiles are hidden in every validation."""
    hidden = hiding(0, len(tiles))
    ranks = comm.world()
    index = torch.arange(-(-len(tiles) // ranks) * ranks)[comm.rank() :: ranks]
    counted = index < len(tiles)
    index = index.clamp(max=len(tiles) - 1)
    model.eval()
    painted = model(tiles[index], hidden[index])
    model.train()
    errors = (painted - tiles[index]).square().mean(dim=-1)[counted]
    mean = Mean()
    mean.add(errors[hidden[index][counted]].sum(), hidden[index][counted].sum())
    return {"val_loss": mean.over_ranks()}
