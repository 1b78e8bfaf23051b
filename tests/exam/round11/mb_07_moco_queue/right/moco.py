import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, dim=24, ch=16):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, ch, 3, 2, 1), nn.GroupNorm(4, ch), nn.ReLU(),
                                  nn.Conv2d(ch, 2 * ch, 3, 2, 1), nn.GroupNorm(4, 2 * ch), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(2 * ch * 9, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        return F.normalize(self.head(self.conv(x).flatten(1)), dim=1)


class MoCo(nn.Module):
    def __init__(self, dim=24, size=128, temperature=0.15):
        super().__init__()
        self.temperature = temperature
        self.query, self.key = Encoder(dim), Encoder(dim)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, xq, xk):
        q = self.query(xq)
        with torch.no_grad():
            k = self.key(xk)
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.t()], 1) / self.temperature
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        self.enqueue(k)
        return loss

    @torch.no_grad()
    def enqueue(self, k):
        parts = [torch.empty_like(k) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, k.contiguous())
        keys = torch.cat(parts)
        ptr = int(self.queue_ptr)
        self.queue = self.queue.clone()
        self.queue[ptr:ptr + len(keys)] = keys
        self.queue_ptr.fill_((ptr + len(keys)) % len(self.queue))

    @torch.no_grad()
    def update_key(self, m):
        for a, b in zip(self.key.parameters(), self.query.parameters()):
            a.mul_(m).add_(b, alpha=1 - m)
