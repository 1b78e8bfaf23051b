import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Backbone(nn.Module):
    def __init__(self, n_proto=32, ch=16):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, ch, 3, 2, 1), nn.GroupNorm(4, ch), nn.GELU(),
            nn.Conv2d(ch, 2 * ch, 3, 2, 1), nn.GroupNorm(4, 2 * ch), nn.GELU(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(2 * ch, 32), nn.GELU(), nn.Linear(32, n_proto))

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class DINOLoss:
    def __init__(self, n_proto, t_student=0.2, t_teacher=0.06, momentum=0.95):
        self.t_student, self.t_teacher, self.momentum = t_student, t_teacher, momentum
        self.center = torch.zeros(n_proto)

    def __call__(self, student, teacher):
        p = F.softmax((teacher - self.center) / self.t_teacher, dim=-1).detach()
        loss = -(p * F.log_softmax(student / self.t_student, dim=-1)).sum(-1).mean()
        self.update(teacher)
        return loss

    @torch.no_grad()
    def update(self, teacher):
        batch = teacher.sum(0)
        count = torch.tensor(float(len(teacher)))
        dist.all_reduce(batch)
        dist.all_reduce(count)
        self.center.lerp_(batch / count, 1 - self.momentum)

    def state_dict(self):
        return {"center": self.center.clone()}


@torch.no_grad()
def update_teacher(teacher, student, m):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.lerp_(s, 1 - m)
