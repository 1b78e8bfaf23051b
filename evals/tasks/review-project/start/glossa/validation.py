"""Loss and accuracy on the held-out documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .masking import Documents
from .meters import Meters
from .text import IGNORED


class Validation:
    """Callable: the numbers over all held-out documents, the same on every rank."""

    def __init__(self, documents: Documents, batch: int = 8) -> None:
        self.masked, self.counted = documents.to_validate()
        self.batch = batch

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        meters = Meters("val_loss", "val_accuracy")
        model.eval()
        for begin in range(0, len(self.masked.inputs), self.batch):
            part = self.masked.rows(slice(begin, begin + self.batch))
            logits = model(part.inputs)
            targets = part.targets.clone()
            targets[max(self.counted - begin, 0) :] = IGNORED
            known = targets != IGNORED
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            right = (logits.argmax(dim=-1) == targets)[known].sum()
            meters.add(known.sum(), val_loss=loss, val_accuracy=right)
        model.train()
        return meters.over_ranks()
