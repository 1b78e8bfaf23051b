"""Synthetic readers. Each has two favourite subjects, goes from book to book of a series, and now and then takes anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .settings import ReaderSettings

NOTHING = 0


@dataclass
class Loans:
    """Histories [readers, longest], the oldest loan first, with NOTHING after the last."""

    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def pick(self, indices: torch.Tensor) -> Loans:
        return Loans(self.rows[indices])

    @property
    def inputs(self) -> torch.Tensor:
        return self.rows[:, :-1]

    @property
    def targets(self) -> torch.Tensor:
        """The next loan at each place."""
        return self.rows[:, 1:]

    def last_places(self) -> torch.Tensor:
        """For each reader the place at which the last loan is to be foretold."""
        return (self.rows != NOTHING).sum(dim=1) - 2


class Library:
    """Which book is on which shelf, and which one follows it in its series."""

    def __init__(self, settings: ReaderSettings) -> None:
        self.settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        self.shelf = torch.randint(0, settings.shelves, (settings.books,), generator=generator)
        self.shelf[NOTHING] = -1
        self.sequel = 1 + torch.randperm(settings.books - 1, generator=generator)
        self.sequel = torch.cat([torch.zeros(1, dtype=torch.long), self.sequel])
        self.on_shelf = [torch.nonzero(self.shelf == number).flatten() for number in range(settings.shelves)]

    def any_book(self, shelves: list[int], generator: torch.Generator) -> int:
        books = torch.cat([self.on_shelf[number] for number in shelves])
        if not len(books):
            books = torch.arange(1, self.settings.books)
        return int(books[torch.randint(0, len(books), (), generator=generator)])

    def history(self, generator: torch.Generator) -> list[int]:
        """Three loans at least; few readers fill all places."""
        longest = self.settings.longest
        size = 3 + int(torch.rand((), generator=generator) ** 2 * (longest - 2))
        favourites = torch.randint(0, self.settings.shelves, (2,), generator=generator).tolist()
        loans = [self.any_book(favourites, generator)]
        while len(loans) < min(size, longest):
            draw = float(torch.rand((), generator=generator))
            if draw < 0.6:
                loans.append(int(self.sequel[loans[-1]]))
            elif draw < 0.95:
                loans.append(self.any_book(favourites, generator))
            else:
                loans.append(1 + int(torch.randint(0, self.settings.books - 1, (), generator=generator)))
        return loans

    def loans(self, readers: int, seed: int) -> Loans:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.full((readers, self.settings.longest), NOTHING)
        for row in rows:
            history = self.history(generator)
            row[: len(history)] = torch.tensor(history)
        return Loans(rows)


def datasets(settings: ReaderSettings) -> tuple[Loans, Loans]:
    """Training and held-out readers of one library."""
    library = Library(settings)
    training = library.loans(settings.training, settings.seed + 1)
    return training, library.loans(settings.held_out, settings.seed + 2)


class Order:
    """Batches of readers without end, shuffled anew in each epoch."""

    def __init__(self, readers: int, batch: int, seed: int) -> None:
        self.readers, self.batch, self.seed = readers, batch, seed
        self.number = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.take()

    def take(self) -> torch.Tensor:
        epoch, place = divmod(self.number, self.readers // self.batch)
        generator = torch.Generator().manual_seed(17 * self.seed + epoch)
        self.number += 1
        return torch.randperm(self.readers, generator=generator)[place * self.batch : (place + 1) * self.batch]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]
