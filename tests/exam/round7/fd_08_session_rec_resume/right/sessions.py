"""Shopping sessions and a shuffled, resumable stream of global batches."""
import torch

N_ITEMS, LEN = 60, 10


def make_sessions(n, seed):
    g = torch.Generator().manual_seed(seed)
    hop = torch.randint(1, 7, (N_ITEMS,), generator=torch.Generator().manual_seed(99))
    seq = torch.randint(0, N_ITEMS, (n, 1), generator=g)
    for _ in range(LEN):
        cur = seq[:, -1]
        nxt = (cur + hop[cur]) % N_ITEMS
        lost = torch.rand(n, generator=g) < 0.2
        nxt = torch.where(lost, torch.randint(0, N_ITEMS, (n,), generator=g), nxt)
        seq = torch.cat([seq, nxt[:, None]], 1)
    return seq


class SessionStream:
    def __init__(self, sessions, batch, seed=0):
        self.sessions, self.batch = sessions, batch
        self.gen = torch.Generator().manual_seed(seed)
        self.per_epoch = len(sessions) // batch
        self.epoch, self.pos, self.perm = 0, 0, None

    def next(self):
        if self.perm is None or self.pos == self.per_epoch:
            if self.perm is not None:
                self.epoch, self.pos = self.epoch + 1, 0
            self._shuffle()
        rows = self.perm[self.pos * self.batch:(self.pos + 1) * self.batch]
        self.pos += 1
        return self.sessions[rows]

    def _shuffle(self):
        self.epoch_rng = self.gen.get_state()
        self.perm = torch.randperm(len(self.sessions), generator=self.gen)

    def state_dict(self):
        return {"rng": self.epoch_rng, "epoch": self.epoch, "pos": self.pos}

    def load_state_dict(self, state):
        self.gen.set_state(state["rng"])
        self.epoch, self.pos = state["epoch"], state["pos"]
        self._shuffle()
