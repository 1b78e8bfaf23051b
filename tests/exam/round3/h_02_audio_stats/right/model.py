import torch
import torch.nn as nn
import torch.nn.functional as F


class ConvBlock(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, 3, padding=1)
        self.norm = nn.GroupNorm(4, c_out)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Tagger(nn.Module):
    def __init__(self, mean, std, classes=4, width=24):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.blocks = nn.Sequential(ConvBlock(len(mean), width), ConvBlock(width, width))
        self.head = nn.Linear(width, classes)

    def forward(self, spec):
        x = (spec - self.mean) / self.std
        return self.head(self.blocks(x.transpose(1, 2)).mean(-1))
