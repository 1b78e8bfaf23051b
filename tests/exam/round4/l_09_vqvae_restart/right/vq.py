import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def gather_rows(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class Quantizer(nn.Module):
    """Codebook kept by exponential moving averages; unused codes are restarted from encoder outputs."""

    def __init__(self, codes=16, dim=8, decay=0.8, beta=0.25, min_use=0.3):
        super().__init__()
        self.decay, self.beta, self.min_use = decay, beta, min_use
        start = torch.randn(codes, dim)
        self.register_buffer("codebook", start)
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("total", start.clone())
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update(self, flat, idx):
        onehot = F.one_hot(idx, len(self.codebook)).float()
        count, summed = onehot.sum(0), onehot.T @ flat
        dist.all_reduce(count)
        dist.all_reduce(summed)
        self.usage.lerp_(count, 1 - self.decay)
        self.total.lerp_(summed, 1 - self.decay)

        dead = (self.usage < self.min_use).nonzero().flatten()
        if len(dead):
            pool = gather_rows(flat)
            g = torch.Generator().manual_seed(int(self.calls))
            pick = torch.randperm(len(pool), generator=g)[:len(dead)]
            self.total[dead[:len(pick)]] = pool[pick]
            self.usage[dead[:len(pick)]] = 1.0
        self.codebook.copy_(self.total / self.usage.clamp(min=1e-3).unsqueeze(1))
        self.calls += 1

    def forward(self, z):
        idx = torch.cdist(z, self.codebook).argmin(1)
        q = self.codebook[idx]
        commit = self.beta * F.mse_loss(z, q)
        if self.training:
            self.update(z.detach(), idx)
        return z + (q - z).detach(), commit, idx
