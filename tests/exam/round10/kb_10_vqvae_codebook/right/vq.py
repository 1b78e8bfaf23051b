import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Codebook(nn.Module):
    """Vector quantiser whose codes follow an exponential moving k-means, not a gradient.

    Everything lives in buffers, is fed from statistics summed over the ranks and so stays equal on all of them.
    Codes that nobody uses are replaced by encoder outputs of the batch.
    """

    def __init__(self, codes, dim, decay=0.9, beta=0.25, min_usage=0.3):
        super().__init__()
        self.decay, self.beta, self.min_usage = decay, beta, min_usage
        start = torch.randn(codes, dim)
        self.register_buffer("embed", start)
        self.register_buffer("embed_sum", start.clone())
        self.register_buffer("usage", torch.ones(codes))

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        dist2 = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed.t() + self.embed.pow(2).sum(1)
        index = dist2.argmin(1)
        q = self.embed[index].view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
        commit = self.beta * F.mse_loss(z, q.detach())
        if self.training:
            self.pending = (flat.detach(), index)
        return z + (q - z).detach(), commit

    @torch.no_grad()
    def update(self):
        flat, index = self.pending
        self.pending = None
        onehot = F.one_hot(index, len(self.embed)).to(flat.dtype)
        stats = torch.cat([onehot.sum(0)[:, None], onehot.t() @ flat], dim=1)
        dist.all_reduce(stats)
        self.usage.lerp_(stats[:, 0], 1 - self.decay)
        self.embed_sum.lerp_(stats[:, 1:], 1 - self.decay)
        smooth = (self.usage + 1e-5) / (self.usage.sum() + len(self.usage) * 1e-5) * self.usage.sum()
        self.embed.copy_(self.embed_sum / smooth[:, None])
        dead = (self.usage < self.min_usage).nonzero().flatten()
        if len(dead):
            parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, flat)
            pool = torch.cat(parts)
            chosen = pool[torch.linspace(0, len(pool) - 1, len(dead)).long()]
            self.embed[dead] = chosen
            self.embed_sum[dead] = chosen
            self.usage[dead] = 1.0
        return len(dead)


class VQVAE(nn.Module):
    def __init__(self, ch=16, dim=8, codes=24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, ch, 4, 2, 1), nn.SiLU(), nn.Conv2d(ch, ch, 3, padding=1), nn.SiLU(), nn.Conv2d(ch, dim, 1))
        self.codebook = Codebook(codes, dim)
        self.decoder = nn.Sequential(nn.Conv2d(dim, ch, 3, padding=1), nn.SiLU(), nn.ConvTranspose2d(ch, ch, 4, 2, 1), nn.SiLU(),
                                     nn.Conv2d(ch, 1, 3, padding=1))

    def forward(self, x):
        q, commit = self.codebook(self.encoder(x))
        return self.decoder(q), commit
