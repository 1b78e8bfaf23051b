import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, d_in, width, d_out, depth):
        super().__init__()
        self.inp = nn.Linear(d_in, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, d_out, bias=False)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return F.normalize(self.out(h), dim=-1)


def teacher_and_student(d_in=14, d_out=8):
    torch.manual_seed(100)
    teacher = Encoder(d_in, 40, d_out, 2).eval().requires_grad_(False)
    torch.manual_seed(200)
    student = Encoder(d_in, 20, d_out, 1)
    return teacher, student
