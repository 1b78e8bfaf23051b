import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Detector(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.SiLU())
        self.neck = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.SiLU())
        self.heat = nn.Conv2d(width, 1, 1)
        self.size = nn.Conv2d(width, 2, 1)
        nn.init.constant_(self.heat.bias, -2.0)

    def forward(self, x):
        f = self.neck(self.backbone(x))
        return self.heat(f), self.size(f)


def detection_loss(heat_logits, size_map, heat, size):
    heat_logits = heat_logits.squeeze(1)
    p = heat_logits.sigmoid()
    bce = F.binary_cross_entropy_with_logits(heat_logits, heat, reduction="none")
    focal = (bce * (heat - p).abs().pow(2)).sum(dim=(1, 2))
    at_centre = (size_map * heat[:, None]).sum(dim=(2, 3))
    return (focal + F.smooth_l1_loss(at_centre, size, reduction="none").sum(1)).mean()


def build():
    torch.manual_seed(12)
    net = Detector()
    fully_shard(net.backbone)
    fully_shard(net.neck)
    return fully_shard(net)
