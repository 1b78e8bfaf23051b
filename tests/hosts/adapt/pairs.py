"""Preference pairs from a JSON-lines file, both answers of a pair packed into one row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FILLING = 0
BETTER, WORSE = 1, 2


class Rows(NamedTuple):
    """Rows [rows, length] of two documents each: segment 1 is the better answer, segment 2 the worse one."""

    ids: Tensor
    positions: Tensor
    segments: Tensor
    answer: Tensor  # whether the token belongs to an answer, and so is to be predicted

    def to(self, device: torch.device) -> Rows:
        """The same rows on a device."""
        return Rows(*(part.to(device) for part in self))

    def targets(self) -> Tensor:
        """Which predictions count, [rows, length - 1]: of an answer's token, from a token of the same document."""
        return self.answer[:, 1:] & (self.segments[:, 1:] == self.segments[:, :-1])


def read_pairs(path: Path) -> list[tuple[bytes, bytes, bytes]]:
    """Prompt, better and worse answer of each line. Raises SystemExit naming a bad line."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            item = json.loads(line)
            pairs.append(tuple((item[key]).encode() for key in ("prompt", "chosen", "rejected")))
        except (ValueError, KeyError, AttributeError) as error:
            raise SystemExit(f"{path}:{number}: {error!r}") from None
    return pairs


def pack(pair: tuple[bytes, bytes, bytes], length: int) -> Rows:
    """One row: prompt and better answer, prompt and worse answer, filling. Long answers are cut."""
    prompt, better, worse = pair
    ids, positions, segments, answer = [], [], [], []
    for segment, text in ((BETTER, better), (WORSE, worse)):
        document = (prompt + text)[: length // 2]
        ids += document
        positions += range(len(document))
        segments += [segment] * len(document)
        answer += [index >= len(prompt) for index in range(len(document))]
    rest = length - len(ids)
    columns = (
        ids + [FILLING] * rest,
        positions + [0] * rest,
        segments + [FILLING] * rest,
        answer + [False] * rest,
    )
    return Rows(*(torch.tensor([column]) for column in columns))


class PairStream:
    """Rows in a shuffled order. `taken` counts rows of the whole world."""

    def __init__(self, path: Path, length: int, global_rows: int, seed: int, rank: int, world: int) -> None:
        self.rows = [pack(pair, length) for pair in read_pairs(path)]
        if global_rows % world:
            raise SystemExit(f"{global_rows} rows in a step do not divide among {world} ranks")
        self.global_rows, self.seed, self.rank, self.world = global_rows, seed, rank, world
        self.steps_per_epoch = len(self.rows) // global_rows
        self.taken = 0

    def next_step(self, rows_per_step: int) -> Iterator[Rows]:
        """This rank's share of the next step, in pieces of at most `rows_per_step`."""
        epoch, step = divmod(self.taken // self.global_rows, self.steps_per_epoch)
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        whole = order[step * self.global_rows : (step + 1) * self.global_rows]
        mine = whole[self.rank :: self.world]
        self.taken += self.global_rows
        for start in range(0, len(mine), rows_per_step):
            piece = [self.rows[index] for index in mine[start : start + rows_per_step]]
            yield Rows(*(torch.cat(column) for column in zip(*piece, strict=True)))
