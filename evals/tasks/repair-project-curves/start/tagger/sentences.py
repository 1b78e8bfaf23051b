"""Synthetic sentences. A word's tag depends on the word and on its neighbours, so that context is needed; some tags are rare."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .settings import SentenceSettings

PAD = 0
NONE = -1  # the tag of padding


@dataclass
class Treebank:
    """Padded sentences and their tags, [sentences, longest] each."""

    words: torch.Tensor
    tags: torch.Tensor

    def __len__(self) -> int:
        return len(self.words)

    def rows(self, indices: torch.Tensor) -> Treebank:
        """Some of them, cut to the longest one's length."""
        words, tags = self.words[indices], self.tags[indices]
        length = int((words != PAD).sum(dim=1).max())
        return Treebank(words[:, :length], tags[:, :length])

    def split(self, pieces: int) -> list[Treebank]:
        return [
            Treebank(words, tags) for words, tags in zip(self.words.chunk(pieces), self.tags.chunk(pieces), strict=True)
        ]


class Grammar:
    """Classes of words, and the rule that makes tags of them."""

    def __init__(self, settings: SentenceSettings) -> None:
        self.settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        self.classes = torch.randint(0, 5, (settings.words,), generator=generator)
        # a table of tags by the classes of a word and its neighbours; low tags are more frequent
        draws = torch.rand(5, 5, 5, generator=generator) ** 2
        self.table = (draws * settings.tags).long()

    def sentence(self, generator: torch.Generator) -> tuple[list[int], list[int]]:
        longest = self.settings.longest
        size = 3 + int(torch.rand((), generator=generator) ** 2 * (longest - 2))
        words = torch.randint(1, self.settings.words, (min(size, longest),), generator=generator)
        inner = self.classes[words]
        before = torch.cat([inner[:1], inner[:-1]])
        after = torch.cat([inner[1:], inner[-1:]])
        return words.tolist(), self.table[before, inner, after].tolist()

    def treebank(self, count: int, seed: int) -> Treebank:
        generator = torch.Generator().manual_seed(seed)
        pairs = [self.sentence(generator) for _ in range(count)]
        words = torch.full((count, self.settings.longest), PAD)
        tags = torch.full((count, self.settings.longest), NONE)
        for row, (own, right) in enumerate(pairs):
            words[row, : len(own)] = torch.tensor(own)
            tags[row, : len(right)] = torch.tensor(right)
        return Treebank(words, tags)


def treebanks(settings: SentenceSettings) -> tuple[Treebank, Treebank]:
    """Training and held-out sentences of one grammar."""
    grammar = Grammar(settings)
    return grammar.treebank(settings.training, settings.seed + 1), grammar.treebank(
        settings.held_out, settings.seed + 2
    )
