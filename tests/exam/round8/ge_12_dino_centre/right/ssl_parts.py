import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, inputs=32, width=64, prototypes=40):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.neck = nn.Linear(width, 24)
        self.prototypes = nn.Parameter(torch.randn(prototypes, 24))

    def forward(self, x):
        h = F.normalize(self.neck(self.body(x)), dim=-1)
        return h @ F.normalize(self.prototypes, dim=-1).t()


class TeacherHead:
    """Softmax targets: centred with a running mean of all ranks' logits, sharpened by a warmed-up temperature."""

    def __init__(self, prototypes, momentum=0.9, warmup=10):
        self.centre = torch.zeros(prototypes)
        self.momentum, self.warmup = momentum, warmup

    def temperature(self, step):
        return 0.1 - 0.05 * min(1.0, step / self.warmup)

    def targets(self, logits, step):
        return torch.softmax((logits - self.centre) / self.temperature(step), -1)

    def update(self, logits):
        mean = logits.mean(0) / dist.get_world_size()
        dist.all_reduce(mean)
        self.centre.mul_(self.momentum).add_(mean, alpha=1 - self.momentum)


def teacher_momentum(step, total, start=0.9):
    return 1 - (1 - start) * 0.5 * (1 + math.cos(math.pi * step / total))


@torch.no_grad()
def follow(teacher, student, momentum):
    """Move the teacher's shards towards the student's; both are sharded in the same way."""
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.to_local().lerp_(s.to_local(), 1 - momentum)


def views(x, g, local):
    """Noisy crops of vectors: a random block of coordinates is blanked out, larger for local views."""
    n, d = x.shape
    length = d // 2 if local else d // 8
    start = torch.randint(d, (n, 1), generator=g)
    position = (torch.arange(d) - start) % d
    noise = 0.2 * torch.randn(n, d, generator=g)
    return torch.where(position < length, 0.0, x + noise)
