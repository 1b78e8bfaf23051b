import torch
import torch.distributed as dist
import torch.nn.functional as F

from gatherfn import gather_rows


def relation_kd(student, teacher, tau):
    """Rows of the similarity matrix of the whole batch: the student's should look like the teacher's."""
    all_student, all_teacher = gather_rows(student), gather_rows(teacher)
    n = student.size(0)
    own = torch.arange(n) + dist.get_rank() * n
    hide = torch.zeros(n, all_student.size(0), dtype=torch.bool).scatter(1, own[:, None], True)
    s = (student @ all_student.T / tau).masked_fill(hide, -1e4)
    t = (teacher @ all_teacher.T / tau).masked_fill(hide, -1e4)
    return F.kl_div(F.log_softmax(s, -1), F.softmax(t, -1), reduction="batchmean")


def contrast(student, teacher, tau):
    """Each student's row must find its teacher's row, and each teacher's row its student's row."""
    all_student, all_teacher = gather_rows(student), gather_rows(teacher)
    label = torch.arange(student.size(0)) + dist.get_rank() * student.size(0)
    a = F.cross_entropy(student @ all_teacher.T / tau, label)
    b = F.cross_entropy(teacher @ all_student.T / tau, label)
    return 0.5 * (a + b)
