import torch
import torch.distributed as dist
import torch.nn as nn

from comm import gather, scatter_sum


class LocalExperts(nn.Module):
    """The experts of this rank. They work on the tokens of all ranks."""

    def __init__(self, total, dim, hidden, seed):
        super().__init__()
        self.count = total // dist.get_world_size()
        self.first = self.count * dist.get_rank()
        up, down = [], []
        for e in range(self.first, self.first + self.count):
            g = torch.Generator().manual_seed(seed + e)
            up.append(torch.randn(dim, hidden, generator=g) / dim ** 0.5)
            down.append(torch.randn(hidden, dim, generator=g) / hidden ** 0.5)
        self.up, self.down = nn.Parameter(torch.stack(up)), nn.Parameter(torch.stack(down))

    def forward(self, x, gate):
        x, gate = gather(x), gather(gate)
        mine = gate[:, self.first:self.first + self.count]
        h = torch.relu(torch.einsum("nd,edh->neh", x, self.up))
        return scatter_sum(torch.einsum("neh,ehd,ne->nd", h, self.down, mine))


class TaskModel(nn.Module):
    """One trunk for all manipulation tasks; the task embedding steers the routing."""

    def __init__(self, obs=10, act=4, tasks=4, dim=16, hidden=32, experts=8):
        super().__init__()
        self.inp = nn.Linear(obs, dim)
        self.task = nn.Embedding(tasks, dim)
        self.router = nn.Linear(2 * dim, experts)
        self.experts = LocalExperts(experts, dim, hidden, seed=60)
        self.out = nn.Linear(dim, act)

    def forward(self, obs, task):
        x, t = torch.tanh(self.inp(obs)), self.task(task)
        gate = torch.softmax(self.router(torch.cat([x, t], -1)), -1)
        return self.out(x + self.experts(x, gate))
