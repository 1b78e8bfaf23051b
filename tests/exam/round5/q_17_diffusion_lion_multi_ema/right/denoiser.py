import torch
import torch.nn as nn
import torch.nn.functional as F


class AdaBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d, elementwise_affine=False)
        self.mod = nn.Linear(d, 3 * d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d))
        nn.init.zeros_(self.mod.weight)
        nn.init.zeros_(self.mod.bias)

    def forward(self, x, c):
        shift, scale, gate = self.mod(F.silu(c)).chunk(3, -1)
        return x + gate * self.ff(self.norm(x) * (1 + scale) + shift)


class EDM(nn.Module):
    """Preconditioned denoiser (Karras) for 2-D points with a class label, label 0 = none."""

    def __init__(self, d=24, depth=2, classes=3, sigma_data=0.7):
        super().__init__()
        self.sd = sigma_data
        self.inp, self.out = nn.Linear(2, d), nn.Linear(d, 2)
        self.noise = nn.Linear(8, d)
        self.label = nn.Embedding(classes + 1, d)
        self.blocks = nn.ModuleList(AdaBlock(d) for _ in range(depth))

    def forward(self, x, sigma, y):
        s = sigma[:, None]
        skip = self.sd**2 / (s**2 + self.sd**2)
        cout = s * self.sd / (s**2 + self.sd**2).sqrt()
        cin = 1 / (s**2 + self.sd**2).sqrt()
        w = (sigma.log() / 4)[:, None] * torch.tensor([1.0, 2.0, 4.0, 8.0])
        c = self.noise(torch.cat([w.sin(), w.cos()], -1)) + self.label(y)
        h = self.inp(cin * x)
        for b in self.blocks:
            h = b(h, c)
        return skip * x + cout * self.out(h)
