import torch


class Replay:
    """Prioritised ring buffer. Every rank holds the same copy (all transitions are exchanged before they are added)."""

    def __init__(self, capacity, obs_dim, alpha=0.6):
        self.capacity, self.alpha = capacity, alpha
        self.data = {
            "obs": torch.zeros(capacity, obs_dim),
            "action": torch.zeros(capacity, dtype=torch.long),
            "reward": torch.zeros(capacity),
            "next": torch.zeros(capacity, obs_dim),
            "done": torch.zeros(capacity),
            "priority": torch.zeros(capacity),
            "cursor": torch.zeros(2, dtype=torch.long),
        }

    def add(self, **items):
        d = self.data
        at, count = d["cursor"].tolist()
        n = len(items["reward"])
        rows = (at + torch.arange(n)) % self.capacity
        for k, v in items.items():
            d[k][rows] = v.to(d[k].dtype)
        d["priority"][rows] = d["priority"].max().clamp(min=1.0)
        d["cursor"][0], d["cursor"][1] = (at + n) % self.capacity, min(self.capacity, count + n)

    def sample(self, n, beta, gen):
        d = self.data
        weight = d["priority"][: d["cursor"][1]].pow(self.alpha)
        rows = torch.multinomial(weight, n, replacement=True, generator=gen)
        importance = (weight[rows] / weight.sum() * len(weight)).pow(-beta)
        return rows, importance / importance.max()
