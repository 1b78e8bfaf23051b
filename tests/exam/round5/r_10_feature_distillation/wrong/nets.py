import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

INPUT, CLASSES = 20, 6


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        self.stem = nn.Linear(INPUT, d)
        self.blocks = nn.ModuleList(ResBlock(d) for _ in range(depth))
        self.head = nn.Linear(d, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


class Bridges(nn.ModuleList):
    """Projections from the student's width to the teacher's, one for each tapped block."""

    def __init__(self, d, teacher_width, taps):
        super().__init__(nn.Linear(d, teacher_width) for _ in range(taps))

    def forward(self, features):
        return [bridge(f) for bridge, f in zip(self, features)]


def build():
    torch.manual_seed(3)
    teacher = Net(32, 2)
    student, bridges = Net(16, 2), Bridges(16, 32, 2)
    for m in (teacher, student):
        for b in m.blocks:
            fully_shard(b)
    return fully_shard(teacher), fully_shard(student), fully_shard(bridges)
