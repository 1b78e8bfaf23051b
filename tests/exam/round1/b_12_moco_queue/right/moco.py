import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Encoder(nn.Module):
    def __init__(self, w=24, d=12):
        super().__init__()
        self.stem = nn.Conv2d(1, w, 4, stride=4)
        self.body = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, w), nn.ReLU(), nn.Conv2d(w, w, 3, padding=1)) for _ in range(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(w * 9, d))

    def forward(self, x):
        x = self.stem(x)
        for b in self.body:
            x = x + b(x)
        return F.normalize(self.head(x), dim=-1)


class MoCo:
    """Query and key encoders (each sharded on its own) and a queue replicated on all ranks."""

    def __init__(self, queue=256, momentum=0.95, tau=0.15):
        q = Encoder()
        k = copy.deepcopy(q).requires_grad_(False)
        self.query, self.key = (self._shard(n) for n in (q, k))
        self.momentum, self.tau = momentum, tau
        self.queue = F.normalize(torch.randn(queue, 12, generator=torch.Generator().manual_seed(0)), dim=-1)
        self.ptr = torch.zeros(1, dtype=torch.long)

    @staticmethod
    def _shard(net):
        for b in net.body:
            fully_shard(b)
        return fully_shard(net, reshard_after_forward=True)

    def loss(self, xq, xk):
        q = self.query(xq)
        with torch.no_grad():
            self._momentum_update()
            k = self.key(xk)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T], dim=1) / self.tau
        out = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        self._enqueue(k)
        return out

    def _momentum_update(self):
        for pk, pq in zip(self.key.parameters(), self.shards):
            pk.lerp_(pq.detach(), 1 - self.momentum)

    def remember_shards(self):
        # parameters() of the query may give unsharded tensors between its forward and backward,
        # so the sharded handles are kept
        self.shards = list(self.query.parameters())

    @torch.no_grad()
    def _enqueue(self, k):
        keys = k.new_empty(len(k) * dist.get_world_size(), k.shape[1])
        dist.all_gather_into_tensor(keys, k.contiguous())
        at = (self.ptr.item() + torch.arange(len(keys))) % len(self.queue)
        self.queue = self.queue.clone()
        self.queue[at] = keys
        self.ptr.add_(len(keys)).remainder_(len(self.queue))
