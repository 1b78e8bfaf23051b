import torch

BOS = 0


class PackedStream:
    """An endless stream of documents, shuffled in a buffer and packed into rows of fixed length.

    Every rank runs the same stream and takes its rows of each global batch; so the state is the same everywhere.
    """

    def __init__(self, vocab, length, buffer=64, seed=0):
        self.vocab, self.length = vocab, length
        self.gen = torch.Generator().manual_seed(seed)
        self.buffer = [self._document() for _ in range(buffer)]
        self.rest, self.rest_doc, self.count = [], [], 0

    def _draw(self, low, high):
        return int(torch.randint(low, high, (1,), generator=self.gen))

    def _document(self):
        start, step, n = self._draw(1, self.vocab), self._draw(1, 4), self._draw(3, 12)
        return [BOS] + [1 + (start + step * i) % (self.vocab - 1) for i in range(n)]

    def _row(self):
        while len(self.rest) < self.length + 1:
            i = self._draw(0, len(self.buffer))
            doc, self.buffer[i] = self.buffer[i], self._document()
            self.rest += doc
            self.rest_doc += [self.count] * len(doc)
            self.count += 1
        row, docs = self.rest[: self.length + 1], self.rest_doc[: self.length + 1]
        self.rest, self.rest_doc = self.rest[self.length :], self.rest_doc[self.length :]
        return row, docs

    def batches(self, rows, rank, world):
        while True:
            drawn = [self._row() for _ in range(rows)]
            mine = drawn[rank::world]
            yield torch.tensor([r for r, _ in mine]), torch.tensor([d for _, d in mine])

    def state_dict(self):
        return {"gen": self.gen.get_state(), "buffer": self.buffer, "rest": self.rest, "rest_doc": self.rest_doc, "count": self.count}

    def load_state_dict(self, state):
        self.gen.set_state(state["gen"])
        self.buffer, self.rest, self.rest_doc, self.count = state["buffer"], state["rest"], state["rest_doc"], state["count"]
