"""The loss and the scores."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from .readers import NOTHING, Loans


def loan_loss(scores: torch.Tensor, loans: Loans, smoothing: float) -> torch.Tensor:
    """The mean over all loans of the batch that are to be foretold, smoothed towards all books."""
    targets = loans.targets.flatten()
    return F.cross_entropy(scores.flatten(0, 1), targets, ignore_index=NOTHING, label_smoothing=smoothing)


@dataclass
class Scores:
    """Sums over readers; each reader's last loan is to be foretold."""

    readers: int = 0
    loss: float = 0.0
    hits: float = 0.0  # among the first five
    reciprocal: float = 0.0

    @classmethod
    def of(cls, scores: torch.Tensor, loans: Loans) -> Scores:
        place = loans.last_places()
        index = torch.arange(len(loans))
        at_last, right = scores[index, place], loans.targets[index, place]
        rank = (at_last > at_last[index, right][:, None]).sum(dim=1) + 1
        return cls(
            readers=len(loans),
            loss=F.cross_entropy(at_last, right, reduction="sum").item(),
            hits=(rank <= 5).sum().item(),
            reciprocal=(1 / rank).sum().item(),
        )

    def __add__(self, other: Scores) -> Scores:
        return Scores(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def means(self) -> dict[str, float]:
        return {
            "val_loss": self.loss / self.readers,
            "hits_at_5": self.hits / self.readers,
            "mrr": self.reciprocal / self.readers,
        }
