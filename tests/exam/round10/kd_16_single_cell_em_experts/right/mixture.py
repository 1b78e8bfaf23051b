import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Expert(nn.Module):
    """Expected expression of one cell type under a stimulus."""

    def __init__(self, n_genes, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, n_genes))

    def forward(self, stim):
        return self.net(stim)


class Mixture(nn.Module):
    def __init__(self, n_types, n_genes):
        super().__init__()
        self.experts = nn.ModuleList(Expert(n_genes) for _ in range(n_types))

    def forward(self, stim):
        return torch.stack([e(stim) for e in self.experts], 1)        # cell, type, gene

    def shard(self):
        for e in self.experts:
            fully_shard(e)
        return fully_shard(self)


class EMState:
    """What the closed-form part of the M-step keeps: type frequencies and noise per type and gene; replicated."""

    def __init__(self, n_types, n_genes):
        self.log_prior = torch.full((n_types,), -math.log(n_types))
        self.var = torch.ones(n_types, n_genes)
        self.bound = torch.tensor(float("-inf"))

    def tensors(self):
        return {"log_prior": self.log_prior, "var": self.var, "bound": self.bound}

    def log_joint(self, mean, expr):
        z = (expr[:, None] - mean).square() / self.var
        return self.log_prior - 0.5 * (z + self.var.log() + math.log(2 * math.pi)).sum(-1)

    @torch.no_grad()
    def e_step(self, mean, expr):
        joint = self.log_joint(mean, expr)
        evidence = joint.logsumexp(1)
        total = torch.stack([evidence.sum(), torch.tensor(float(len(expr)))])
        dist.all_reduce(total)
        self.bound.copy_(total[0] / total[1])
        return (joint - evidence[:, None]).exp()

    @torch.no_grad()
    def closed_form(self, resp, mean, expr):
        count = resp.sum(0)
        square = (resp[..., None] * (expr[:, None] - mean).square()).sum(0)
        dist.all_reduce(count)
        dist.all_reduce(square)
        self.log_prior.copy_(((count + 1) / (count + 1).sum()).log())
        # inverse-gamma prior keeps a small type's variance from collapsing
        self.var.copy_((square + 2.0) / (count[:, None] + 4.0))
