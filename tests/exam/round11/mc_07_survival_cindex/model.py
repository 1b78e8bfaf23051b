import torch
import torch.nn as nn


class DiscreteHazard(nn.Module):
    """Piecewise-constant hazards on fixed intervals (logistic hazard model)."""

    def __init__(self, columns, edges, width=24):
        super().__init__()
        self.register_buffer("edges", edges)
        self.trunk = nn.Sequential(nn.Linear(columns, width), nn.SELU(), nn.Linear(width, width), nn.SELU())
        self.hazard = nn.Linear(width, len(edges))

    def logits(self, x):
        return self.hazard(self.trunk(x))

    def forward(self, x, time=None, event=None):
        z = self.logits(x)
        if time is None:
            # risk score: expected number of events until the last edge
            return torch.nn.functional.softplus(z).sum(-1)
        bucket = torch.bucketize(time, self.edges).clamp_max(len(self.edges) - 1)
        at_risk = (torch.arange(z.shape[1])[None] <= bucket[:, None]).float()
        target = torch.zeros_like(z)
        target[torch.arange(len(z)), bucket] = event
        nll = torch.nn.functional.binary_cross_entropy_with_logits(z, target, reduction="none")
        return (nll * at_risk).sum(-1).mean()
