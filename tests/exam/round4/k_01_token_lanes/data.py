"""Tokenised corpus on disk: one .bin file (uint16) per lane, documents end with EOS."""
import os

import numpy as np
import torch

EOS = 0
VOCAB = 48


def write_corpus(folder, n_files=4, seed=1234):
    os.makedirs(folder, exist_ok=True)
    for f in range(n_files):
        rng = np.random.default_rng(seed + f)
        out = []
        for _ in range(90 + 17 * f):
            n = int(rng.integers(6, 40))
            a, b = rng.integers(1, 5), rng.integers(1, VOCAB)
            doc = [(b + a * i + int(rng.random() < 0.05)) % (VOCAB - 1) + 1 for i in range(n)]
            out.extend(doc + [EOS])
        np.array(out, dtype=np.uint16).tofile(os.path.join(folder, f"lane_{f:02d}.bin"))


class Lane:
    """Reads one file from front to back, always beginning a row at the start of a document."""

    def __init__(self, path, seq_len):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.seq_len = seq_len
        self.pos = 0

    def next_row(self):
        need = self.seq_len + 1
        if self.pos + need >= len(self.tokens):
            self.pos = 0
        row = np.array(self.tokens[self.pos:self.pos + need], dtype=np.int64)
        # continue with the first document that begins inside the last part of this row
        ends = np.flatnonzero(row == EOS)
        self.pos += int(ends[-1]) + 1 if len(ends) else need
        return torch.from_numpy(row)


class LaneReader:
    def __init__(self, folder, seq_len, rank, world):
        files = sorted(f for f in os.listdir(folder) if f.endswith(".bin"))
        assert len(files) % world == 0, "number of lanes must be divisible by the number of ranks"
        self.lanes = [Lane(os.path.join(folder, f), seq_len) for f in files[rank::world]]

    def next_batch(self):
        rows = torch.stack([lane.next_row() for lane in self.lanes])
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self):
        return [lane.pos for lane in self.lanes]

    def load_state_dict(self, state):
        for lane, pos in zip(self.lanes, state):
            lane.pos = pos
