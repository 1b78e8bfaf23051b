import torch
import torch.distributed as dist
import torch.nn.functional as F


class KeyQueue:
    """Ring of the last keys of the whole job. All ranks push the gathered keys in rank order, so the copies never differ."""

    def __init__(self, size, dim, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.keys = F.normalize(torch.randn(size, dim, generator=g), dim=-1)
        self.head = 0

    @torch.no_grad()
    def push(self, keys):
        parts = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, keys.contiguous())
        new = torch.cat(parts)
        assert len(self.keys) % len(new) == 0
        self.keys[self.head:self.head + len(new)] = new
        self.head = (self.head + len(new)) % len(self.keys)

    def state_dict(self):
        return {"keys": self.keys, "head": self.head}

    def load_state_dict(self, d):
        self.keys.copy_(d["keys"])
        self.head = d["head"]
