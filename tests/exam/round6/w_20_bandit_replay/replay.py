import torch
import torch.distributed as dist


class Replay:
    """Prioritised replay that lives on rank 0 only; minibatches are scattered, priorities gathered back."""

    def __init__(self, capacity=256, d=10):
        self.capacity = capacity
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.rank == 0:
            self.rows = torch.zeros(0, d + 2)
            self.priority = torch.zeros(0)
            self.g = torch.Generator().manual_seed(31)

    def add(self, rows):
        if self.rank == 0:
            self.rows = torch.cat([self.rows, rows])[-self.capacity:]
            top = self.priority.max() if len(self.priority) else torch.tensor(1.0)
            self.priority = torch.cat([self.priority, top.expand(len(rows))])[-self.capacity:]

    def sample(self, size):
        """This rank's part of a global minibatch: rows and importance weights (scaled to a maximum of one)."""
        mine = torch.empty(size // self.world, 13)
        parts = None
        if self.rank == 0:
            prob = self.priority / self.priority.sum()
            self.last = torch.multinomial(prob, size, replacement=True, generator=self.g)
            weight = (prob[self.last] * len(prob)) ** -0.5
            full = torch.cat([self.rows[self.last], (weight / weight.max())[:, None]], dim=1)
            parts = [p.contiguous() for p in full.chunk(self.world)]
        dist.scatter(mine, parts, src=0)
        return mine[:, :12], mine[:, 12]

    def feedback(self, error):
        parts = [torch.empty_like(error) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(error.contiguous(), parts, dst=0)
        if self.rank == 0:
            # round off, so that the draw doesn't hang on the last bit
            self.priority[self.last] = (torch.cat(parts) * 100).round() / 100 + 0.05

    def state(self):
        return {"rows": self.rows, "priority": self.priority, "g": self.g.get_state()} if self.rank == 0 else None

    def load(self, s):
        if self.rank == 0:
            self.rows, self.priority = s["rows"], s["priority"]
            self.g.set_state(s["g"])
