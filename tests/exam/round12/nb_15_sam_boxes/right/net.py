import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Stage(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1)
        self.mix = nn.Conv2d(cout, cout, 1)

    def forward(self, x):
        h = F.silu(self.conv(x))
        return h + self.mix(h)


class BoxNet(nn.Module):
    """Per cell of a 4x4 grid: objectness and the box height and width."""

    def __init__(self, width=20):
        super().__init__()
        self.stages = nn.ModuleList([Stage(1, width, 2), Stage(width, width, 2), Stage(width, width, 1)])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.out(x)


def loss_parts(pred, obj, size):
    """Sums, not means: objectness over all cells, box regression over cells with an object."""
    objectness = F.binary_cross_entropy_with_logits(pred[:, 0], obj, reduction="sum")
    where = obj > 0
    boxes = F.smooth_l1_loss(pred[:, 1:].permute(0, 2, 3, 1)[where], size[where], reduction="sum")
    return objectness, boxes


def build():
    torch.manual_seed(20)
    net = BoxNet()
    for stage in net.stages:
        fully_shard(stage)
    return fully_shard(net)
