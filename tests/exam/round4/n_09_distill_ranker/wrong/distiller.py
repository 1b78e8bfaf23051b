import torch
import torch.nn as nn
import torch.nn.functional as F


class Scorer(nn.Module):
    def __init__(self, feats, width, depth, dropout=0.0, norm=False):
        super().__init__()
        self.inp = nn.Linear(feats, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) if norm else nn.Identity() for _ in range(depth))
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(width, 1, bias=False)  # a listwise loss does not see a common offset

    def forward(self, x):
        shape = x.shape[:-1]
        h = self.inp(x.reshape(-1, x.shape[-1]))
        for lin, norm in zip(self.layers, self.norms):
            h = h + self.drop(F.relu(norm(lin(h))))
        return self.out(h).reshape(shape)


class Distiller(nn.Module):
    """Student and frozen teacher; forward gives the listwise distillation loss of a batch of queries."""

    def __init__(self, teacher, student, temperature=1.0):
        super().__init__()
        self.teacher, self.student, self.temperature = teacher.eval().requires_grad_(False), student, temperature

    def forward(self, x):
        with torch.no_grad():
            goal = (self.teacher(x) / self.temperature).softmax(-1)
        return -(goal * (self.student(x) / self.temperature).log_softmax(-1)).sum(-1).mean()


def train_teacher(x, y, steps=60):
    teacher = Scorer(x.shape[-1], 48, 2, dropout=0.2, norm=True)
    opt = torch.optim.Adam(teacher.parameters(), lr=0.01)
    for _ in range(steps):
        loss = F.mse_loss(teacher(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return teacher
