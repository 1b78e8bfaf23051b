import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    """Top-k experts, balanced without an auxiliary loss: a bias per expert moves the choice, not the weights."""

    def __init__(self, dim, hidden, experts=8, top_k=2, speed=0.05):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) / hidden**0.5)
        self.top_k, self.speed = top_k, speed
        self.register_buffer("choice_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, x):
        score = torch.sigmoid(self.router(x))
        chosen = (score + self.choice_bias).topk(self.top_k, dim=-1).indices
        mask = F.one_hot(chosen, score.shape[-1]).sum(-2).to(x.dtype)
        if self.training:
            self.load += mask.detach().sum(0)
        gate = score * mask
        gate = gate / gate.sum(-1, keepdim=True)
        h = F.silu(torch.einsum("nd,edh->neh", x, self.w1))
        return torch.einsum("neh,ehd,ne->nd", h, self.w2, gate)

    @torch.no_grad()
    def update_bias(self):
        """Raises the bias of the experts with too few tokens and lowers that of the others."""
        dist.all_reduce(self.load)
        self.choice_bias += self.speed * torch.sign(self.load.mean() - self.load)
        self.load.zero_()
