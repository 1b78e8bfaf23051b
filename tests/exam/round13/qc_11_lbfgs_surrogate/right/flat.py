"""A sharded model as one flat vector, of which each rank holds its piece."""
import torch
import torch.distributed as dist


class FlatParameters:
    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]

    @torch.no_grad()
    def values(self):
        return torch.cat([p.to_local().reshape(-1) for p in self.params])

    @torch.no_grad()
    def gradient(self):
        flat = torch.cat([p.grad.to_local().reshape(-1) for p in self.params])
        for p in self.params:
            p.grad = None
        return flat

    @torch.no_grad()
    def assign(self, flat):
        at = 0
        for p in self.params:
            local = p.to_local()
            local.copy_(flat[at:at + local.numel()].view_as(local))
            at += local.numel()


def dot(a, b):
    total = (a * b).sum()
    dist.all_reduce(total)
    return total
