"""Adaptive gradient clipping (Brock et al. 2021) on parameters sharded along dim 0."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def _local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def _unit_norm(t):
    # one norm per output unit; a unit is a whole row of dim 0 and so lies on one rank
    return t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1))


@torch.no_grad()
def adaptive_clip_(params, clip=0.02, eps=1e-3):
    """Clips unit-wise; vectors (gains, biases) count as one unit each."""
    vectors = []
    for p in params:
        if p.grad is None:
            continue
        if p.ndim >= 2:
            w, g = _local(p), _local(p.grad)
            if w.numel():
                limit = clip * _unit_norm(w).clamp(min=eps)
                g.mul_((limit / _unit_norm(g).clamp(min=1e-12)).clamp(max=1.0))
        else:
            vectors.append(p)
    if not vectors:
        return
    # all vector norms in one reduction
    sq = torch.tensor([[_local(p).square().sum(), _local(p.grad).square().sum()] for p in vectors])
    if isinstance(vectors[0], DTensor):
        dist.all_reduce(sq)
    w_norm, g_norm = sq.sqrt().unbind(1)
    scale = (clip * w_norm.clamp(min=eps) / g_norm.clamp(min=1e-12)).clamp(max=1.0)
    for p, s in zip(vectors, scale):
        _local(p.grad).mul_(s)
