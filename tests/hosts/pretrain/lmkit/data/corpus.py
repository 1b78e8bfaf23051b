"""Documents from a random grammar: the next token depends on the two before it, with some noise."""

from __future__ import annotations

import numpy as np

from ..config import Data

BOS = 0


class Corpus:
    """Documents of uneven length. The same seed gives the same text on every rank."""

    def __init__(self, config: Data, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        rng = np.random.default_rng(config.seed)
        self.table = rng.integers(1, vocabulary, size=(16, 16))
        lengths = rng.integers(config.shortest, config.longest + 1, size=config.documents)
        self.documents = [self._write(rng, int(length)) for length in lengths]

    def _write(self, rng: np.random.Generator, length: int) -> np.ndarray:
        words = [BOS, int(rng.integers(1, self.vocabulary))]
        while len(words) < length:
            if rng.random() < 0.1:
                words.append(int(rng.integers(1, self.vocabulary)))
            else:
                words.append(int(self.table[words[-2] % 16, words[-1] % 16]))
        return np.asarray(words, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.documents)

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """The order of the documents in one epoch."""
        return np.random.default_rng((seed, epoch)).permutation(len(self))
