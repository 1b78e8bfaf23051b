"""Replay memory filled by reservoir sampling; the same on every rank, because it sees the global batch."""
import torch


class Reservoir:
    def __init__(self, size, dim, seed):
        self.x = torch.zeros(size, dim)
        self.y = torch.zeros(size, dtype=torch.long)
        self.seen = 0
        self.rng = torch.Generator().manual_seed(seed)

    def add(self, x, y):
        for xi, yi in zip(x, y):
            slot = self.seen
            if self.seen >= len(self.x):
                slot = int(torch.randint(0, self.seen + 1, (1,), generator=self.rng))
            self.seen += 1
            if slot < len(self.x):
                self.x[slot], self.y[slot] = xi, yi

    def sample(self, n):
        idx = torch.randint(0, min(self.seen, len(self.x)), (n,), generator=self.rng)
        return self.x[idx], self.y[idx]

    def state_dict(self):
        return {"x": self.x, "y": self.y, "seen": torch.tensor(self.seen), "rng": self.rng.get_state()}

    def load_state_dict(self, state):
        self.x, self.y, self.seen = state["x"], state["y"], int(state["seen"])
        self.rng.set_state(state["rng"])
