"""Accuracy and the mean F1 of the tags on held-out sentences."""

from __future__ import annotations

import torch
from torch import nn

from . import comm
from .losses import TagLoss
from .sentences import NONE, Treebank


def rounds(sentences: int, batch: int) -> list[torch.Tensor]:
    """This rank's batches, as many as every other rank's: a rank that has no sentence left takes the first one, marked by -1."""
    each = batch * comm.world()
    filled = torch.full((-(-sentences // each) * each,), -1)
    filled[:sentences] = torch.arange(sentences)
    return [group[comm.rank() :: comm.world()] for group in filled.split(each)]


@torch.no_grad()
def scores(model: nn.Module, held_out: Treebank, loss: TagLoss, tags: int, batch: int = 8) -> dict[str, float]:
    """Over all held-out words, the same on every rank."""
    confusion = torch.zeros(tags, tags, dtype=torch.float64)  # [right, predicted]
    sum = weight = 0.0
    model.eval()
    for indices in rounds(len(held_out), batch):
        part = held_out.rows(indices.clamp(min=0))
        right = part.tags.masked_fill((indices < 0)[:, None], NONE)
        logits = model(part.words)
        sum += loss.sum(logits, right).item()
        weight += loss.weight(right)
        known = right != NONE
        pairs = right[known] * tags + logits.argmax(dim=-1)[known]
        confusion += torch.bincount(pairs, minlength=tags * tags).view(tags, tags)
    model.train()
    sum, weight, *counts = comm.total(sum, weight, *confusion.flatten().tolist())
    confusion = torch.tensor(counts, dtype=torch.float64).view(tags, tags)
    hits = confusion.diagonal()
    f1 = 2 * hits / (confusion.sum(dim=0) + confusion.sum(dim=1)).clamp(min=1)
    return {
        "val_loss": sum / weight,
        "accuracy": (hits.sum() / confusion.sum()).item(),
        "f1": f1.mean().item(),
    }
