import torch.nn as nn
import torch.nn.functional as F


class SimSiam(nn.Module):
    def __init__(self, size=10, dim=24):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(16 * 9, dim))
        self.projector = nn.Sequential(nn.LayerNorm(dim), nn.GELU(), nn.Linear(dim, dim), nn.LayerNorm(dim))
        self.predictor = nn.Sequential(nn.Linear(dim, dim // 2), nn.GELU(), nn.Linear(dim // 2, dim))

    def forward(self, a, b):
        za, zb = self.projector(self.backbone(a)), self.projector(self.backbone(b))
        pa, pb = self.predictor(za), self.predictor(zb)
        sim = lambda p, z: F.cosine_similarity(p, z.detach(), dim=-1).mean()
        return -0.5 * (sim(pa, zb) + sim(pb, za))
