"""Synthetic text. A language is a table of successors; a document is a walk on it, with some noise.

Documents differ much in length, as real ones do: most are short, few fill the whole context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAD, BEGIN, END, MASK = 0, 1, 2, 3
SPECIAL = 4
IGNORED = -100


@dataclass
class TextSettings:
    vocab: int = 64
    length: int = 24
    documents: int = 240
    held_out: int = 45
    branches: int = 3  # words that may follow a word
    noise: float = 0.1
    seed: int = 0


class Language:
    """Which words follow which."""

    def __init__(self, settings: TextSettings) -> None:
        generator = torch.Generator().manual_seed(settings.seed + 7)
        self.settings = settings
        words = settings.vocab - SPECIAL
        self.successors = SPECIAL + torch.randint(0, words, (settings.vocab, settings.branches), generator=generator)

    def document(self, generator: torch.Generator) -> list[int]:
        """Words with a begin and an end, at most `length` of them."""
        settings = self.settings
        longest = settings.length - 2
        size = 2 + int(torch.rand((), generator=generator) ** 3 * (longest - 1))
        word = SPECIAL + int(torch.randint(0, settings.vocab - SPECIAL, (), generator=generator))
        words = [word]
        while len(words) < size:
            if torch.rand((), generator=generator) < settings.noise:
                word = SPECIAL + int(torch.randint(0, settings.vocab - SPECIAL, (), generator=generator))
            else:
                word = int(self.successors[word, torch.randint(0, settings.branches, (), generator=generator)])
            words.append(word)
        return [BEGIN, *words[:longest], END]

    def documents(self, count: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [self.document(generator) for _ in range(count)]


def corpora(settings: TextSettings) -> tuple[list[list[int]], list[list[int]]]:
    """Training and held-out documents of one language."""
    language = Language(settings)
    training = language.documents(settings.documents, settings.seed + 1)
    return training, language.documents(settings.held_out, settings.seed + 2)


def padded(documents: list[list[int]], length: int) -> torch.Tensor:
    """[documents, length], with PAD after the end of each."""
    rows = [document[:length] + [PAD] * (length - len(document)) for document in documents]
    return torch.tensor(rows, dtype=torch.long).reshape(-1, length)


def next_words(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [n, t - 1] of a causal model; where the target is padding, nothing is to be learned."""
    targets = rows[:, 1:].clone()
    targets[targets == PAD] = IGNORED
    return rows[:, :-1], targets


def masked_words(rows: torch.Tensor, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with words replaced by MASK, and targets that are those words and IGNORED elsewhere.

    Which words are masked depends on the seed alone, so every rank that asks for the same rows gets the same masks.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.rand(rows.shape, generator=generator) < share) & (rows >= SPECIAL)
    hidden[:, 1] |= rows[:, 1] >= SPECIAL  # one word of each document at least
    inputs, targets = rows.clone(), torch.full_like(rows, IGNORED)
    inputs[hidden], targets[hidden] = MASK, rows[hidden]
    return inputs, targets
