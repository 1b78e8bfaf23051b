"""Loss and accuracy on the held-out dialogues."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .dialogues import answers_only
from .text import IGNORED


@torch.no_grad()
def validate(model: nn.Module, rows: torch.Tensor, batch: int = 8) -> dict[str, float]:
    """All of them, in this process."""
    loss = right = words = 0.0
    model.eval()
    for part in rows.split(batch):
        inputs, targets = answers_only(part)
        logits = model(inputs)
        learned = targets != IGNORED
        loss += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        right += (logits.argmax(dim=-1) == targets)[learned].sum().item()
        words += learned.sum().item()
    model.train()
    return {"val_loss": loss / words, "val_accuracy": right / words}
