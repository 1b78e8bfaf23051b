"""Loss and accuracy on the held-out documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from . import comm
from .meters import Meters
from .text import IGNORED, next_words


@torch.no_grad()
def held_out(model: nn.Module, rows: torch.Tensor, batch: int = 8) -> dict[str, float]:
    """Each rank takes its documents; the numbers are those of all."""
    meters = Meters("val_loss", "val_accuracy")
    model.eval()
    for part in rows[comm.rank() :: comm.world()].split(batch):
        inputs, targets = next_words(part)
        logits = model(inputs)
        known = targets != IGNORED
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        meters.add(known.sum(), val_loss=loss, val_accuracy=(logits.argmax(dim=-1) == targets)[known].sum())
    model.train()
    return meters.over_ranks()
