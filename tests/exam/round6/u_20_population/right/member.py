import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16 * 9, 5)

    def forward(self, x):
        return self.head(torch.relu(self.conv2(torch.relu(self.conv1(x)))).flatten(1))


class Member:
    def __init__(self, index, lr):
        torch.manual_seed(70 + index)
        self.index = index
        self.net = Classifier()
        fully_shard(self.net.conv2)
        fully_shard(self.net, reshard_after_forward=True)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)

    @property
    def lr(self):
        return self.opt.param_groups[0]["lr"]

    @torch.no_grad()
    def become(self, other, factor):
        """Take over weights and momentum of a better member, all of it on the shards, and change the learning rate."""
        for p, q in zip(self.net.parameters(), other.net.parameters()):
            p.copy_(q)
            self.opt.state[p]["momentum_buffer"].copy_(other.opt.state[q]["momentum_buffer"])
        self.opt.param_groups[0]["lr"] = other.lr * factor
