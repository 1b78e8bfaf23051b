"""The loss: preference over a reference (DPO), plus a likelihood of the better answers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from lora import reference
from recipe import Loss
from torch import Tensor, nn

from pairs import BETTER, WORSE, Rows


class Terms(NamedTuple):
    """Sums over the rows of a piece; the caller divides by what the whole world has."""

    preference: Tensor  # over pairs
    likelihood: Tensor  # over the tokens of better answers
    margin: Tensor  # over pairs, for the log
    won: Tensor


def log_likelihood(model: nn.Module, rows: Rows) -> Tensor:
    """Log-probability of every counted token, zero elsewhere, [rows, length - 1]."""
    logits = model(rows.ids, rows.positions, rows.segments).float()
    each = -F.cross_entropy(logits[:, :-1].transpose(1, 2), rows.ids[:, 1:], reduction="none")
    return each * rows.targets()


def by_answer(each: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Sums over the tokens of the better and of the worse answer, [rows] each."""
    segments = rows.segments[:, 1:]
    return (each * (segments == BETTER)).sum(-1), (each * (segments == WORSE)).sum(-1)


def terms(model: nn.Module, rows: Rows, config: Loss) -> Terms:
    """All sums of one piece. The reference is the same model with its adapters off."""
    with torch.no_grad(), reference(model):
        base_better, base_worse = by_answer(log_likelihood(model, rows), rows)
    each = log_likelihood(model, rows)
    better, worse = by_answer(each, rows)
    margin = (better - base_better) - (worse - base_worse)
    return Terms(
        preference=-F.logsigmoid(config.beta * margin).sum(),
        likelihood=-better.sum(),
        margin=margin.detach().sum(),
        won=(margin.detach() > 0).sum(),
    )


def better_tokens(rows: Rows) -> int:
    """Tokens over which the likelihood is a mean."""
    return int((rows.targets() & (rows.segments[:, 1:] == BETTER)).sum())
