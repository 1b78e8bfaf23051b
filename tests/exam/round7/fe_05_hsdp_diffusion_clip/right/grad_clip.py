import torch
import torch.distributed as dist


@torch.no_grad()
def clip_gradients(params, max_norm, mesh):
    """Scales the gradients to a global norm of at most max_norm; one reduction for all parameters."""
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    total = torch.stack([g.float().square().sum() for g in grads]).sum()
    dist.all_reduce(total, group=mesh.get_group("shard"))
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, scale)
    return norm
