import torch


@torch.no_grad()
def adaptive_clip(params, limit=0.05, eps=1e-3):
    """Adaptive gradient clipping: limits each gradient to a share of the norm of its weight."""
    clipped = 0
    for p in params:
        if p.grad is None:
            continue
        w_norm = p.norm().full_tensor().clamp(min=eps)
        g_norm = p.grad.norm().full_tensor()
        if g_norm > limit * w_norm:
            p.grad.to_local().mul_(limit * w_norm / g_norm)
            clipped += 1
    return clipped
