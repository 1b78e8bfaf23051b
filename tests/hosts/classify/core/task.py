"""What a trainer needs to know of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import TASKS


class Task(ABC):
    """A loss to train on, and sums to judge by."""

    @abstractmethod
    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over the samples of a batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Sums over the samples of a batch, with their number as `count`."""


@TASKS.register("classification")
class Classification(Task):
    """Cross-entropy with smoothed labels; judged by accuracy and by the loss without smoothing."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=self.label_smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "correct": (logits.argmax(-1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }
