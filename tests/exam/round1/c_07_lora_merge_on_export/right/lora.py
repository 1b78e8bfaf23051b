import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank correction."""

    def __init__(self, base: nn.Linear, rank=4, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale

    def _delta(self):
        return (self.lora_b.full_tensor() @ self.lora_a.full_tensor()) * self.scale

    @torch.no_grad()
    def _add(self, delta):
        from torch.distributed.tensor import distribute_tensor

        w = self.base.weight
        w.add_(distribute_tensor(delta, w.device_mesh, w.placements))

    def merge(self):
        self._add(self._delta().detach())

    def unmerge(self):
        self._add(-self._delta().detach())


def inject(module, **kw):
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child, **kw))
        else:
            inject(child, **kw)
