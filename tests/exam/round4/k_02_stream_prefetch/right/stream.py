"""Endless text stream -> shuffle buffer -> packed rows; a background thread keeps a few batches ready."""
import queue
import random
import threading

import torch

BOS = 1
VOCAB = 40


def document(i):
    """Document number i of the (endless) stream, reproducible."""
    rng = random.Random(i * 7919 + 13)
    a, b, n = rng.choice([1, 2, 3]), rng.randrange(VOCAB), rng.randrange(8, 30)
    return [BOS] + [2 + (b + a * k) % (VOCAB - 2) for k in range(n)]


class PackedStream:
    def __init__(self, rows, row_len, buffer=24, seed=0):
        self.rows, self.row_len, self.size = rows, row_len, buffer
        self.rng = random.Random(seed)
        self.next_doc, self.buffer, self.left = 0, [], []

    def _pull(self):
        while len(self.buffer) < self.size:
            self.buffer.append(self.next_doc)
            self.next_doc += 1
        k = self.rng.randrange(len(self.buffer))
        self.buffer[k], self.buffer[-1] = self.buffer[-1], self.buffer[k]
        return document(self.buffer.pop())

    def next_batch(self):
        need = self.rows * (self.row_len + 1)
        while len(self.left) < need:
            self.left.extend(self._pull())
        flat, self.left = self.left[:need], self.left[need:]
        return torch.tensor(flat).view(self.rows, self.row_len + 1)

    def state_dict(self):
        return {"next_doc": self.next_doc, "buffer": list(self.buffer), "left": list(self.left),
                "rng": self.rng.getstate()}

    def load_state_dict(self, s):
        self.next_doc, self.buffer, self.left = s["next_doc"], list(s["buffer"]), list(s["left"])
        self.rng.setstate(s["rng"])


class Prefetcher:
    """Iterates over a stream with `depth` batches prepared ahead by a thread."""

    def __init__(self, stream, depth=3):
        self.stream = stream
        self.queue = queue.Queue(maxsize=depth)
        self.current = stream.state_dict()
        self.thread = threading.Thread(target=self._fill, daemon=True)

    def start(self):
        self.thread.start()
        return self

    def _fill(self):
        while True:
            batch = self.stream.next_batch()
            self.queue.put((batch, self.stream.state_dict()))

    def __iter__(self):
        return self

    def __next__(self):
        batch, self.current = self.queue.get()
        return batch

    def state_dict(self):
        return self.current
