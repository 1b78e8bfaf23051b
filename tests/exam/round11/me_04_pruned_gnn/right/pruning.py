import torch


class MagnitudePruner:
    """Gradual global magnitude pruning (cubic schedule) of the matrices of a sharded model."""

    def __init__(self, named_params, begin, end, every, target):
        self.params = {n: p for n, p in named_params if p.ndim == 2}
        self.begin, self.end, self.every, self.target = begin, end, every, target
        self.masks = {n: torch.ones_like(p.to_local()) for n, p in self.params.items()}

    def sparsity_at(self, step):
        t = min(max((step - self.begin) / (self.end - self.begin), 0.0), 1.0)
        return self.target * (1 - (1 - t) ** 3)

    @torch.no_grad()
    def after_step(self, step):
        if self.begin <= step <= self.end and (step - self.begin) % self.every == 0:
            self.update_masks(self.sparsity_at(step))
        for name, p in self.params.items():
            p.to_local().mul_(self.masks[name])

    def update_masks(self, sparsity):
        everything = torch.cat([p.full_tensor().abs().flatten() for p in self.params.values()])
        k = int(sparsity * everything.numel())
        if k == 0:
            return
        threshold = everything.kthvalue(k).values
        for name, p in self.params.items():
            self.masks[name] = (p.to_local().abs() > threshold).float()

    @torch.no_grad()
    def measured(self):
        zeros = sum(int((p.full_tensor() == 0).sum()) for p in self.params.values())
        return zeros / sum(p.numel() for p in self.params.values())
