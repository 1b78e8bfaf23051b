import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Backbone(nn.Module):
    def __init__(self, d=32, out_dim=24):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 5, stride=5)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, 16))
        self.prototypes = nn.Linear(16, out_dim, bias=False)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            h = layer(h)
        return self.prototypes(F.normalize(self.head(h.mean(1)), dim=-1))


class DINOLoss(nn.Module):
    def __init__(self, out_dim, t_student=0.1, t_teacher=0.04, momentum=0.8):
        super().__init__()
        self.t_student, self.t_teacher, self.momentum = t_student, t_teacher, momentum
        self.register_buffer("center", torch.zeros(1, out_dim), persistent=False)

    def forward(self, s_views, t_views):
        loss = 0.0
        for i, t in enumerate(t_views):
            target = F.softmax((t - self.center) / self.t_teacher, dim=-1).detach()
            for j, s in enumerate(s_views):
                if i != j:
                    loss = loss - (target * F.log_softmax(s / self.t_student, dim=-1)).sum(-1).mean()
        self.update_center(torch.cat(t_views))
        return loss / 2

    @torch.no_grad()
    def update_center(self, t):
        c = t.mean(0, keepdim=True)
        dist.all_reduce(c)
        self.center.lerp_(c / dist.get_world_size(), 1 - self.momentum)


@torch.no_grad()
def ema_(teacher, student, m):
    for pt, ps in zip(teacher.parameters(), student.parameters()):
        pt.lerp_(ps, 1 - m)
