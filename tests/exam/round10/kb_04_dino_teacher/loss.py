import torch
import torch.distributed as dist
import torch.nn.functional as F


class DinoLoss:
    def __init__(self, dim, student_temp=0.1, teacher_temp=0.05, momentum=0.9):
        self.center = torch.zeros(dim)
        self.student_temp, self.teacher_temp, self.momentum = student_temp, teacher_temp, momentum

    def __call__(self, student, teacher):
        s1, s2 = (student / self.student_temp).chunk(2)
        t1, t2 = F.softmax((teacher - self.center) / self.teacher_temp, dim=-1).chunk(2)
        loss = -(t1 * F.log_softmax(s2, -1)).sum(-1).mean() - (t2 * F.log_softmax(s1, -1)).sum(-1).mean()
        self.update_center(teacher)
        return loss / 2

    @torch.no_grad()
    def update_center(self, teacher):
        mean = teacher.mean(0)
        dist.all_reduce(mean)
        self.center.lerp_(mean / dist.get_world_size(), 1 - self.momentum)
