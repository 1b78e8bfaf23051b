import torch
import torch.distributed as dist


@torch.no_grad()
def clip_grad_norm(params, max_norm):
    """Clips to a global norm with one small reduction for the whole model."""
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    square = torch.stack([g.square().sum() for g in grads]).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm
