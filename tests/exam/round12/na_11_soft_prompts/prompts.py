import torch
import torch.nn as nn


class PromptBank(nn.Module):
    """A few virtual tokens and a small classifier for each task."""

    def __init__(self, tasks, length, dim, classes):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(tasks, length, dim) * 0.5)
        self.weight = nn.Parameter(torch.randn(tasks, classes, dim) / dim ** 0.5)
        self.bias = nn.Parameter(torch.zeros(tasks, classes))


class PromptedModel(nn.Module):
    def __init__(self, backbone, bank):
        super().__init__()
        self.backbone, self.bank = backbone, bank

    def forward(self, ids, task):
        n = self.bank.tokens.shape[1]
        h = self.backbone(self.bank.tokens[task], ids)
        pooled = h[:, :n].mean(1)
        return torch.einsum("bcd,bd->bc", self.bank.weight[task], pooled) + self.bank.bias[task]


def average_gradients(params):
    """One flat all-reduce for the parameters that every rank holds in full."""
    grads = [p.grad for p in params]
    flat = torch.cat([g.reshape(-1) for g in grads])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(piece.view_as(g))
