import torch
import torch.distributed as dist


class ReplicatedGrads:
    """Averages the gradients of parameters that FSDP leaves alone, in one flat all-reduce per step."""

    def __init__(self, params):
        self.params = list(params)
        for p in self.params:
            dist.broadcast(p.data, src=0)

    @torch.no_grad()
    def reduce(self):
        flat = torch.cat([p.grad.flatten() for p in self.params])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, g in zip(self.params, flat.split([p.numel() for p in self.params])):
            p.grad.copy_(g.view_as(p))


def clip_all(sharded, replicated, max_norm):
    """One norm over both kinds: shards are summed over the ranks, replicated gradients count once."""
    local = lambda g: g.to_local() if hasattr(g, "to_local") else g
    square = sum(local(p.grad).pow(2).sum() for p in sharded)
    dist.all_reduce(square)
    square = square + sum(p.grad.pow(2).sum() for p in replicated)
    coef = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0).item()
    for p in [*sharded, *replicated]:
        local(p.grad).mul_(coef)
    return square.sqrt().item()
