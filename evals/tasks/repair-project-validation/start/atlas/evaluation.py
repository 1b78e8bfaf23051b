"""Loss and accuracy on the held-out documents.

The documents are split among the ranks. FSDP gathers weights in every forward, so all ranks must make the same number of them: the
list is filled up to a multiple of the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from . import comm
from .text import IGNORED, next_words


@dataclass
class Counts:
    """What adds up over batches."""

    loss: float = 0.0
    right: float = 0.0
    words: float = 0.0

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        learned = targets != IGNORED
        self.loss += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        self.right += (logits.argmax(dim=-1) == targets)[learned].sum().item()
        self.words += learned.sum().item()

    def means(self) -> dict[str, float]:
        return {"loss": self.loss / max(self.words, 1), "accuracy": self.right / max(self.words, 1)}


def share(documents: int, ranks: int, rank: int) -> torch.Tensor:
    """The documents of a rank; as many on each."""
    each = math.ceil(documents / ranks)
    filled = torch.arange(each * ranks) % documents
    return filled.view(ranks, each)[rank]


class Evaluation:
    """Callable: the numbers of a model, the same on every rank."""

    def __init__(self, rows: torch.Tensor, batch: int) -> None:
        self.own = rows[share(len(rows), comm.world(), comm.rank())]
        self.batch = batch

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        counts = Counts()
        model.eval()
        for rows in self.own.split(self.batch):
            inputs, targets = next_words(rows)
            counts.add(model(inputs), targets)
        model.train()
        means = counts.means()
        loss, accuracy = (value / comm.world() for value in comm.total(means["loss"], means["accuracy"]))
        return {"val_loss": loss, "val_accuracy": accuracy, "perplexity": math.exp(min(loss, 50.0))}
