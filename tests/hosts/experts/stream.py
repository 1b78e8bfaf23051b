"""Endless sums modulo a number. A sample depends on its index and on nothing else."""

from __future__ import annotations

import numpy as np
import torch
from conf import Task
from torch import Tensor


def vocabulary(task: Task) -> int:
    """Numbers, plus and equals."""
    return task.modulus + 2


def sample(task: Task, index: int) -> tuple[list[int], list[int]]:
    """Tokens `a + b + c = s1 s2 ..` without the last, and the running sums that are to be said."""
    rng = np.random.default_rng((task.seed, index))
    numbers = rng.integers(task.modulus, size=task.terms).tolist()
    sums = np.cumsum(numbers).astype(int) % task.modulus
    if task.noise and rng.random() < task.noise:
        sums = rng.integers(task.modulus, size=task.terms)
    plus, equals = task.modulus, task.modulus + 1
    question = [token for number in numbers for token in (number, plus)]
    question[-1] = equals
    answers = sums.tolist()
    return question + answers[:-1], answers


def collate(task: Task, indices: range) -> tuple[Tensor, Tensor]:
    """Samples side by side."""
    tokens, answers = zip(*(sample(task, index) for index in indices), strict=True)
    return torch.tensor(tokens), torch.tensor(answers)


def share(update: int, size: int, rank: int, world: int) -> range:
    """The indices of one rank in one update: whole updates lie behind each other, ranks inside them."""
    if size % world:
        raise SystemExit(f"batch.size={size} does not divide among {world} ranks")
    each = size // world
    first = update * size + rank * each
    return range(first, first + each)


def cut(indices: range, most: int) -> list[range]:
    """Pieces of equal length, none longer than `most`."""
    pieces = -(-len(indices) // most)
    while len(indices) % pieces:
        pieces += 1
    size = len(indices) // pieces
    return [indices[start : start + size] for start in range(0, len(indices), size)]
