import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class DINOLoss(nn.Module):
    def __init__(self, out_dim, student_temp=0.1, teacher_temp=0.04, center_momentum=0.8):
        super().__init__()
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    def forward(self, student, teacher):
        """student, teacher: lists of outputs, one a view"""
        if self.updates == 0:
            self.update_center(torch.cat(teacher))
        targets = [F.softmax((t - self.center) / self.teacher_temp, dim=-1).detach() for t in teacher]
        total, terms = 0.0, 0
        for i, q in enumerate(targets):
            for j, s in enumerate(student):
                if i == j:
                    continue
                total = total - (q * F.log_softmax(s / self.student_temp, dim=-1)).sum(-1).mean()
                terms += 1
        self.update_center(torch.cat(teacher))
        return total / terms

    @torch.no_grad()
    def update_center(self, teacher):
        batch_center = teacher.mean(dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center /= dist.get_world_size()
        momentum = self.center_momentum if self.updates > 0 else 0.0
        self.center.lerp_(batch_center, 1 - momentum)
        self.updates += 1
