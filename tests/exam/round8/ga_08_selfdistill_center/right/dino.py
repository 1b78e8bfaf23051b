import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def encoder(dim=24, width=48, out=16):
    return nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.LayerNorm(width),
                         nn.Linear(width, width), nn.GELU(), nn.Linear(width, out))


class DinoLoss:
    def __init__(self, out=16, t_student=0.2, t_teacher=0.1, momentum=0.8):
        self.center = torch.zeros(1, out)
        self.ts, self.tt, self.momentum = t_student, t_teacher, momentum

    def __call__(self, student, teacher):
        """student, teacher: lists with the outputs of the two views."""
        target = [F.softmax((t - self.center) / self.tt, -1) for t in teacher]
        logp = [F.log_softmax(s / self.ts, -1) for s in student]
        return -(target[0] * logp[1] + target[1] * logp[0]).sum(-1).mean() / 2

    @torch.no_grad()
    def update_center(self, teacher):
        batch = torch.cat(teacher)
        mean = batch.sum(0, keepdim=True)
        dist.all_reduce(mean)
        mean /= len(batch) * dist.get_world_size()
        self.center = self.center * self.momentum + mean * (1 - self.momentum)


@torch.no_grad()
def update_teacher(student, teacher, m):
    for s, t in zip(student.parameters(), teacher.parameters()):
        t.lerp_(s, 1 - m)
