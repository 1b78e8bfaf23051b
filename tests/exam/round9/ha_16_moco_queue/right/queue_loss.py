import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def gather_in_order(x):
    """Rows of the whole batch in their global order (rank r has rows r, r + world, ...)."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts, 1).flatten(0, 1)


class KeyQueue(nn.Module):
    """Ring of keys from earlier batches; the same on all ranks."""

    def __init__(self, size, dim, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.register_buffer("keys", F.normalize(torch.randn(size, dim, generator=g), dim=-1))
        self.register_buffer("head", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def push(self, own_keys):
        keys = gather_in_order(own_keys)
        slots = (self.head + torch.arange(len(keys))) % len(self.keys)
        self.keys[slots] = keys
        self.head.add_(len(keys)).remainder_(len(self.keys))

    def loss(self, queries, keys, temperature):
        positive = (queries * keys).sum(-1, keepdim=True)
        negative = queries @ self.keys.clone().T
        logits = torch.cat([positive, negative], 1) / temperature
        return F.cross_entropy(logits, torch.zeros(len(queries), dtype=torch.long))
