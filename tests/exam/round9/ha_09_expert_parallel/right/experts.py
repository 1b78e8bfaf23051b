import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class GatherTokens(torch.autograd.Function):
    """all_gather along dim 0; the backward is the matching reduce_scatter (sum)."""

    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.narrow(0, dist.get_rank() * ctx.n, ctx.n)


class CombineTokens(torch.autograd.Function):
    """reduce_scatter (sum) along dim 0; the backward is the matching all_gather."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        n = x.shape[0] // dist.get_world_size()
        return x.narrow(0, dist.get_rank() * n, n).clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class ExpertParallelMoE(nn.Module):
    """The experts are divided among the ranks and are not sharded further. Every rank sees all tokens,
    runs its own experts on those routed to them and the parts are summed. No token is dropped."""

    def __init__(self, dim, hidden, n_experts, top_k=2):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        assert n_experts % world == 0
        self.n_experts, self.top_k = n_experts, top_k
        self.router = nn.Linear(dim, n_experts, bias=False)
        up = torch.randn(n_experts, dim, hidden) * dim ** -0.5
        down = torch.randn(n_experts, hidden, dim) * hidden ** -0.5
        self.first = rank * (n_experts // world)
        own = slice(self.first, self.first + n_experts // world)
        self.up = nn.Parameter(up[own].clone())
        self.down = nn.Parameter(down[own].clone())

    def expert_parameters(self):
        return [self.up, self.down]

    def forward(self, x):
        shape = x.shape
        flat = x.reshape(-1, shape[-1])
        probs = self.router(flat).softmax(-1)
        top, index = probs.topk(self.top_k, -1)
        gates = torch.zeros_like(probs).scatter(1, index, top / top.sum(-1, keepdim=True))
        tokens, gates = GatherTokens.apply(flat), GatherTokens.apply(gates)
        mixed = torch.zeros_like(tokens)
        for local in range(self.up.shape[0]):
            weight = gates[:, self.first + local]
            rows = weight.detach().nonzero().squeeze(1)
            hidden = F.gelu(tokens[rows] @ self.up[local])
            mixed = mixed.index_add(0, rows, weight[rows, None] * (hidden @ self.down[local]))
        return CombineTokens.apply(mixed).view(shape), (probs, index)


def balance_loss(probs, index, n_experts, world):
    """Switch-style loss over the global batch. Only the mean probability carries a gradient; the share of
    tokens is a constant and is reduced over the ranks."""
    share = torch.bincount(index.flatten(), minlength=n_experts).float() / index.numel()
    dist.all_reduce(share)
    return n_experts * (share / world * probs.mean(0)).sum()
