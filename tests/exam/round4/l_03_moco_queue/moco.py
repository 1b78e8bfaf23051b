import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class MoCo(nn.Module):
    def __init__(self, encoder, dim=16, queue=128, m=0.95, tau=0.2):
        super().__init__()
        self.m, self.tau, self.queue_len = m, tau, queue
        self.query = encoder
        self.key = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(queue, dim), dim=-1))
        self.register_buffer("ptr", torch.zeros((), dtype=torch.long))

    def shard(self):
        for enc in (self.query, self.key):
            for blk in enc.blocks:
                fully_shard(blk)
            fully_shard(enc, reshard_after_forward=True)
        return self

    @torch.no_grad()
    def update_key(self):
        for pk, pq in zip(self.key.parameters(), self.query.parameters()):
            pk.lerp_(pq, 1 - self.m)

    @torch.no_grad()
    def enqueue(self, keys):
        parts = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, keys.contiguous())
        keys = torch.cat(parts)
        pos = (int(self.ptr) + torch.arange(len(keys))) % self.queue_len
        self.queue[pos] = keys
        self.ptr.copy_((int(self.ptr) + len(keys)) % self.queue_len)

    def forward(self, a, b):
        q = self.query(a)
        with torch.no_grad():
            k = self.key(b)
        pos = (q * k).sum(-1, keepdim=True)
        neg = q @ self.queue.clone().T
        logits = torch.cat([pos, neg], 1) / self.tau
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)), k
