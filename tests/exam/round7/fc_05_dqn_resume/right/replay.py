import torch


class Replay:
    """Ring buffer of transitions. Every rank holds the same global buffer and trains on its part of each sampled batch."""

    def __init__(self, capacity, obs_dim, seed):
        self.cap = capacity
        self.s = torch.zeros(capacity, obs_dim)
        self.a = torch.zeros(capacity, dtype=torch.long)
        self.r = torch.zeros(capacity)
        self.s2 = torch.zeros(capacity, obs_dim)
        self.done = torch.zeros(capacity)
        self.pos = self.full = 0
        self.gen = torch.Generator().manual_seed(seed)

    def add(self, s, a, r, s2, done):
        idx = (self.pos + torch.arange(len(a))) % self.cap
        self.s[idx], self.a[idx], self.r[idx], self.s2[idx], self.done[idx] = s, a, r, s2, done
        self.pos = (self.pos + len(a)) % self.cap
        self.full = min(self.cap, self.full + len(a))

    def sample(self, n):
        idx = torch.randint(0, self.full, (n,), generator=self.gen)
        return self.s[idx], self.a[idx], self.r[idx], self.s2[idx], self.done[idx]

    def state_dict(self):
        d = {k: v for k, v in vars(self).items() if k != "gen"}
        return d | {"rng": self.gen.get_state()}

    def load_state_dict(self, d):
        self.gen.set_state(d["rng"])
        for k, v in d.items():
            if k != "rng":
                setattr(self, k, v)
