import torch
import torch.nn as nn
import torch.nn.functional as F


class Detector(nn.Module):
    """One-stage detector: every cell of a 4x4 grid predicts classes and a box."""

    def __init__(self, classes=3, ch=16):
        super().__init__()
        self.stages = nn.ModuleList()
        cin = 3
        for mult in (1, 2, 2):
            self.stages.append(nn.Sequential(nn.Conv2d(cin, ch * mult, 3, stride=2 if cin != ch else 1, padding=1),
                                             nn.GroupNorm(4, ch * mult), nn.SiLU()))
            cin = ch * mult
        self.cls_head = nn.Conv2d(cin, classes, 3, padding=1)
        self.box_head = nn.Conv2d(cin, 4, 3, padding=1)
        nn.init.constant_(self.cls_head.bias, -2.0)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.cls_head(x), self.box_head(x)


def focal_loss(logits, target, alpha=0.25, gamma=2.0):
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p_t = p * target + (1 - p) * (1 - target)
    a_t = alpha * target + (1 - alpha) * (1 - target)
    return (a_t * (1 - p_t) ** gamma * ce).sum()
