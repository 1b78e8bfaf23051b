import torch


class WeightAverage:
    """Exponential average of the (sharded) parameters, swapped into the model for an evaluation."""

    def __init__(self, model, decay):
        self.decay = decay
        self.live = dict(model.named_parameters())
        self.average = {n: p.detach().clone() for n, p in self.live.items()}

    @torch.no_grad()
    def update(self, step):
        decay = min(self.decay, (1 + step) / (4 + step))
        for n, p in self.live.items():
            self.average[n].lerp_(p.detach(), 1 - decay)

    @torch.no_grad()
    def _swap(self):
        for n, p in self.live.items():
            kept = p.detach().clone()
            p.copy_(self.average[n])
            self.average[n].copy_(kept)

    def __enter__(self):
        self._swap()
        return self

    def __exit__(self, *exc):
        self._swap()
