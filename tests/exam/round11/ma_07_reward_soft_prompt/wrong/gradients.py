import torch
import torch.distributed as dist


def average_replicated(params):
    """The replicated parameters are not managed by FSDP, so their gradients are averaged here."""
    for p in params:
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


@torch.no_grad()
def clip_gradients(sharded, replicated, max_norm):
    """Clip by the norm over sharded and replicated parameters together; returns the norm."""
    total = torch.zeros(())
    for p in sharded:
        total += p.grad.to_local().square().sum()
    for p in replicated:
        total += p.grad.square().sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in sharded:
        p.grad.to_local().mul_(scale)
    for p in replicated:
        p.grad.mul_(scale)
    return norm.item()
