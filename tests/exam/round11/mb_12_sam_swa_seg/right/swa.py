import torch


class SWA:
    """Equal average of the weights at the ends of the cycles; tensors have the sharding of the weights."""

    @torch.no_grad()
    def __init__(self, model):
        self.n = 0
        self.mean = {k: torch.zeros_like(p) for k, p in model.named_parameters()}

    @torch.no_grad()
    def collect(self, model):
        self.n += 1
        for k, p in model.named_parameters():
            self.mean[k].add_(p - self.mean[k], alpha=1 / self.n)

    @torch.no_grad()
    def swap(self, model):
        for k, p in model.named_parameters():
            tmp = p.detach().clone()
            p.copy_(self.mean[k])
            self.mean[k].copy_(tmp)
