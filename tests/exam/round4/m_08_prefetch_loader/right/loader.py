import queue
import threading

import torch


class Source:
    """Documents of a synthetic corpus; document k is always the same."""

    def __init__(self, vocab=24, length=10):
        self.vocab, self.length = vocab, length
        g = torch.Generator().manual_seed(2)
        self.jump = torch.randint(1, vocab, (vocab,), generator=g)

    def doc(self, k):
        g = torch.Generator().manual_seed(50_000 + k)
        tok = [int(torch.randint(self.vocab, (1,), generator=g))]
        for _ in range(self.length):
            tok.append((tok[-1] + int(self.jump[tok[-1]])) % self.vocab)
        return torch.tensor(tok)


class PrefetchLoader:
    """Builds batches in a thread, `depth` batches ahead of the training loop.

    The global batch number b holds documents [b*B, (b+1)*B); this rank builds its own share of them.
    """

    def __init__(self, source, global_batch, rank, world, depth=3):
        self.source, self.global_batch = source, global_batch
        self.rank, self.local, self.depth = rank, global_batch // world, depth
        self.built = 0
        self.served = 0
        self.thread = None

    def _fill(self):
        while not self.stopping.is_set():
            lo = self.built * self.global_batch + self.rank * self.local
            batch = torch.stack([self.source.doc(k) for k in range(lo, lo + self.local)])
            self.built += 1
            while not self.stopping.is_set():
                try:
                    self.ready.put(batch, timeout=0.1)
                    break
                except queue.Full:
                    continue

    def __iter__(self):
        self.ready = queue.Queue(maxsize=self.depth)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._fill, daemon=True)
        self.thread.start()
        return self

    def __next__(self):
        batch = self.ready.get()
        self.served += 1
        return batch[:, :-1], batch[:, 1:]

    def close(self):
        if self.thread is not None:
            self.stopping.set()
            self.thread.join()

    def state_dict(self):
        return {"next_batch": self.served}

    def load_state_dict(self, state):
        self.built = self.served = state["next_batch"]
