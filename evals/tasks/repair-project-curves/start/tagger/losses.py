"""The loss: a weighted mean over words. A rare tag's word weighs more than a frequent one's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .sentences import NONE, Treebank


class TagLoss:
    """Sums and weights apart, so that whoever adds up parts can divide by what belongs to all of them."""

    def __init__(self, training: Treebank, tags: int, rare: float) -> None:
        counts = torch.bincount(training.tags[training.tags != NONE], minlength=tags).clamp(min=1).float()
        weights = (counts / counts.sum()) ** -rare
        self.weights = weights / weights.mean()

    def weight(self, tags: torch.Tensor) -> float:
        """The sum of the weights of the words that have a tag."""
        return self.weights[tags[tags != NONE]].sum().item()

    def sum(self, logits: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the words' losses."""
        return F.cross_entropy(
            logits.flatten(0, 1), tags.flatten(), weight=self.weights, ignore_index=NONE, reduction="sum"
        )
