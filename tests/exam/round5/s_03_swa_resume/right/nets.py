import torch.nn as nn


def mlp(d_in=10, width=24, classes=5):
    return nn.Sequential(
        nn.Sequential(nn.Linear(d_in, width), nn.ReLU()),
        nn.Sequential(nn.Linear(width, width), nn.ReLU()),
        nn.Sequential(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, classes),
    )
