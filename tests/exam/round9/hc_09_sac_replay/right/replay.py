import torch
import torch.distributed as dist


class SharedReplay:
    """Ring buffer with the transitions of all ranks, in the order of the environments; equal on every rank."""

    def __init__(self, capacity, width):
        self.rows = torch.zeros(capacity, width)
        self.size = 0
        self.head = 0

    def add(self, local):
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        rows = torch.cat(parts)
        slots = (self.head + torch.arange(len(rows))) % len(self.rows)
        self.rows[slots] = rows
        self.head = (self.head + len(rows)) % len(self.rows)
        self.size = min(self.size + len(rows), len(self.rows))

    def state_dict(self):
        return {"rows": self.rows, "size": self.size, "head": self.head}

    def load_state_dict(self, s):
        self.rows, self.size, self.head = s["rows"], s["size"], s["head"]
