import torch
import torch.nn.functional as F
from torch import nn


class TeacherNet(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.c2, self.b2 = nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(24 * 16, classes)

    def forward(self, x):
        x = F.relu(self.b1(self.c1(x)))
        x = F.relu(self.b2(self.c2(x)))
        return self.fc(self.drop(x.flatten(1)))


class StudentNet(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 4, stride=4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(3, 12), nn.Conv2d(12, 12, 3, padding=1), nn.GELU()) for _ in range(2)
        )
        self.fc = nn.Linear(12 * 4, classes)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = x + b(x)
        return self.fc(x.flatten(1))


class Distiller(nn.Module):
    def __init__(self, student, teacher, tau=3.0, alpha=0.7):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.tau, self.alpha = tau, alpha

    def forward(self, x, y):
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / self.tau, dim=-1)
        logits = self.student(x)
        kd = F.kl_div(F.log_softmax(logits / self.tau, dim=-1), soft, reduction="batchmean") * self.tau**2
        return self.alpha * kd + (1 - self.alpha) * F.cross_entropy(logits, y)
