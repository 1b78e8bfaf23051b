import torch
import torch.nn as nn
import torch.nn.functional as F


class EMAQuantizer(nn.Module):
    """Codebook learned by moving averages (van den Oord et al., appendix A.1)."""

    def __init__(self, n_codes, dim, decay=0.9, eps=1e-5, beta=0.25):
        super().__init__()
        self.n_codes, self.decay, self.eps, self.beta = n_codes, decay, eps, beta
        codes = torch.randn(n_codes, dim) * 0.5
        self.register_buffer("codes", codes)
        self.register_buffer("cluster_size", torch.ones(n_codes))
        self.register_buffer("cluster_sum", codes.clone())

    @torch.no_grad()
    def update_codebook(self, flat, idx):
        onehot = F.one_hot(idx, self.n_codes).to(flat.dtype)
        stats = torch.cat([onehot.sum(0)[:, None], onehot.t() @ flat], dim=1)
        count, total = stats[:, 0], stats[:, 1:]
        self.cluster_size.lerp_(count, 1 - self.decay)
        self.cluster_sum.lerp_(total, 1 - self.decay)
        n = self.cluster_size.sum()
        size = (self.cluster_size + self.eps) / (n + self.n_codes * self.eps) * n
        self.codes.copy_(self.cluster_sum / size[:, None])

    def forward(self, z):
        b, c, h, w = z.shape
        flat = z.permute(0, 2, 3, 1).reshape(-1, c)
        idx = torch.cdist(flat, self.codes).argmin(1)
        q = self.codes[idx].view(b, h, w, c).permute(0, 3, 1, 2)
        commit = self.beta * F.mse_loss(z, q.detach())
        if self.training:
            self.update_codebook(flat.detach(), idx)
        return z + (q - z).detach(), commit, idx
