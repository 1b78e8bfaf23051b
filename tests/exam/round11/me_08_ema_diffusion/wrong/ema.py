import torch


class ShardedEMA:
    """Exponential moving average of the weights, sharded like the parameters."""

    def __init__(self, model, decay=0.98):
        self.decay = decay
        self.params = dict(model.named_parameters())
        self.shadow = {n: p.detach().to(torch.bfloat16) for n, p in self.params.items()}

    @torch.no_grad()
    def update(self):
        for n, p in self.params.items():
            s = self.shadow[n]
            s.add_(p.detach().to(s.dtype) - s, alpha=1 - self.decay)

    @torch.no_grad()
    def full(self):
        return {n: s.full_tensor().float() for n, s in self.shadow.items()}
