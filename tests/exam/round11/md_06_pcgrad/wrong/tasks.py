import torch
import torch.nn as nn
import torch.nn.functional as F

TASKS = ("position", "contact", "slip")


class MultiTaskNet(nn.Module):
    def __init__(self, inputs=12, width=40):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.trunk = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2))
        self.heads = nn.ModuleDict({"position": nn.Linear(width, 3), "contact": nn.Linear(width, 4), "slip": nn.Linear(width, 1)})

    def forward(self, x):
        h = self.stem(x)
        for block in self.trunk:
            h = h + block(h)
        return {name: head(h) for name, head in self.heads.items()}


def task_loss(name, out, y):
    if name == "position":
        return F.mse_loss(out[name], y[name])
    if name == "contact":
        return F.cross_entropy(out[name], y[name])
    return F.binary_cross_entropy_with_logits(out[name].sum(-1), y[name])


def sensor_batch(step, size, seed=70):
    """Tactile sensor readings with three labels that share, and fight over, the same features."""
    fixed = torch.Generator().manual_seed(seed)
    a = torch.randn(12, 3, generator=fixed) / 3
    b = torch.randn(3, 4, generator=fixed)
    g = torch.Generator().manual_seed(seed * 1000 + step)
    x = torch.randn(size, 12, generator=g)
    pos = torch.tanh(x @ a)
    contact = (-(pos @ b) + 0.2 * torch.randn(size, 4, generator=g)).argmax(1)
    slip = ((pos.sum(1) - pos.prod(1)) < 0).float()
    return x, {"position": pos, "contact": contact, "slip": slip}
