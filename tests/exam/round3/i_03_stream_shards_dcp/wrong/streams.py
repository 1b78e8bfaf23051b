"""Streaming data: eight 'files', each an endless stream with its own shuffle buffer."""

import torch

N_FILES, DIM = 8, 12


class FileStream:
    def __init__(self, file_id, buffer=16):
        self.file_id = file_id
        g = torch.Generator().manual_seed(1000 + file_id)
        w = torch.randn(DIM, 3, generator=torch.Generator().manual_seed(99))
        self.x = torch.randn(160, DIM, generator=g) + 0.3 * torch.randn(DIM, generator=g)
        self.y = torch.tanh(self.x @ w) + 0.05 * torch.randn(160, 3, generator=g)
        self.rng = torch.Generator().manual_seed(file_id)
        self.buffer, self.cursor = list(range(buffer)), buffer

    def take(self, k):
        out = []
        for _ in range(k):
            j = int(torch.randint(len(self.buffer), (1,), generator=self.rng))
            out.append(self.buffer[j])
            self.buffer[j] = self.cursor % len(self.x)
            self.cursor += 1
        return self.x[out], self.y[out]

    def state_dict(self):
        return {"cursor": self.cursor, "buffer": torch.tensor(self.buffer), "rng": self.rng.get_state()}

    def load_state_dict(self, sd):
        self.cursor, self.buffer = sd["cursor"], sd["buffer"].tolist()
        self.rng.set_state(sd["rng"])


class StreamLoader:
    """Every rank reads its share of the files; each file gives `per_file` samples to every step."""

    def __init__(self, rank, world, per_file=4):
        self.files = [FileStream(i) for i in range(N_FILES)[rank::world]]
        self.per_file = per_file

    def __iter__(self):
        while True:
            parts = [f.take(self.per_file) for f in self.files]
            yield torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def state_dict(self):
        return {f"file_{i}": f.state_dict() for i, f in enumerate(self.files)}

    def load_state_dict(self, sd):
        for f, state in zip(self.files, sd.values()):
            f.load_state_dict(state)
