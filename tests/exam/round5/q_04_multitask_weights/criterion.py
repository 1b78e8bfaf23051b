import torch
import torch.nn as nn
import torch.nn.functional as F


class UncertaintyWeighted(nn.Module):
    """Kendall et al.: one learned log-variance per task balances the losses."""

    def __init__(self, tasks=("depth", "seg", "edge")):
        super().__init__()
        self.tasks = tasks
        self.log_var = nn.Parameter(torch.zeros(len(tasks)))

    def forward(self, out, target):
        raw = torch.stack([
            (out["depth"] - target["depth"]).abs().mean(),
            F.cross_entropy(out["seg"], target["seg"]),
            F.binary_cross_entropy_with_logits(out["edge"], target["edge"]),
        ])
        total = (torch.exp(-self.log_var) * raw + 0.5 * self.log_var).sum()
        return total, raw.detach()
