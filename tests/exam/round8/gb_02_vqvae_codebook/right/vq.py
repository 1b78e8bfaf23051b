import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class EMAQuantizer(nn.Module):
    """Codebook learned by exponential moving averages (van den Oord et al., appendix A.1), no gradient."""

    def __init__(self, codes=24, dim=8, decay=0.9, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        self.register_buffer("codebook", torch.randn(codes, dim))
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_sum", self.codebook.clone())

    @torch.no_grad()
    def update(self, flat, onehot):
        counts = onehot.sum(0)
        sums = onehot.t() @ flat
        dist.all_reduce(counts)
        dist.all_reduce(sums)
        self.cluster_size.lerp_(counts, 1 - self.decay)
        self.embed_sum.lerp_(sums, 1 - self.decay)
        total = self.cluster_size.sum()
        smoothed = (self.cluster_size + self.eps) / (total + len(counts) * self.eps) * total
        self.codebook.copy_(self.embed_sum / smoothed[:, None])

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        idx = torch.cdist(flat.detach(), self.codebook).argmin(1)
        quantized = self.codebook[idx].view_as(z)
        if self.training:
            self.update(flat.detach(), F.one_hot(idx, len(self.codebook)).to(flat.dtype))
        commit = F.mse_loss(z, quantized)
        return z + (quantized - z).detach(), commit, idx


class VQVAE(nn.Module):
    def __init__(self, ch=16, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, ch, 4, 2, 1), nn.SiLU(), nn.Conv2d(ch, ch, 4, 2, 1), nn.SiLU(),
                                     nn.Conv2d(ch, dim, 1, bias=False), nn.GroupNorm(dim, dim))
        self.quantizer = EMAQuantizer(dim=dim)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(dim, ch, 4, 2, 1), nn.SiLU(),
                                     nn.ConvTranspose2d(ch, ch, 4, 2, 1), nn.SiLU(), nn.Conv2d(ch, 1, 3, 1, 1))

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1)
        q, commit, idx = self.quantizer(z)
        return self.decoder(q.permute(0, 3, 1, 2)), commit, idx
