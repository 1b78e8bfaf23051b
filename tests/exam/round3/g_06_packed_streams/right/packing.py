"""Documents of any length are packed into rows of a fixed length. Every row of the global batch has its own stream of documents."""

import json

import torch

VOCAB, BOS = 40, 0


def document(number):
    g = torch.Generator().manual_seed(500 + number)
    length = int(torch.randint(4, 30, (1,), generator=g))
    start, stride = int(torch.randint(1, VOCAB, (1,), generator=g)), 1 + number % 4
    return [BOS] + [1 + (start + stride * k) % (VOCAB - 1) for k in range(length)]


class PackedStream:
    """row number `lane` of the batch; reads documents lane, lane + lanes, lane + 2 * lanes, ..."""

    def __init__(self, lane, lanes, length):
        self.lane, self.length, self.lanes = lane, length, lanes
        self.next_document, self.carry = lane, []

    def next_row(self):
        while len(self.carry) < self.length:
            self.carry += document(self.next_document)
            self.next_document += self.lanes
        row, self.carry = self.carry[: self.length], self.carry[self.length :]
        return row

    def dump(self):
        return json.dumps({"next_document": self.next_document, "carry": self.carry})

    def restore(self, text):
        state = json.loads(text)
        self.next_document, self.carry = state["next_document"], state["carry"]


class PackedLoader:
    def __init__(self, rank, world, lanes=8, length=25):
        per_rank = lanes // world
        self.streams = [PackedStream(lane, lanes, length) for lane in range(rank * per_rank, (rank + 1) * per_rank)]

    def __iter__(self):
        while True:
            yield torch.tensor([s.next_row() for s in self.streams])

    def state_dict(self):
        return {f"lane{s.lane}": s.dump() for s in self.streams}

    def load_state_dict(self, state):
        for s in self.streams:
            s.restore(state[f"lane{s.lane}"])
