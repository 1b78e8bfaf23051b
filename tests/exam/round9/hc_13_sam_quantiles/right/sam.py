import torch
import torch.distributed as dist


class SAM:
    """Sharpness-aware minimisation around any optimizer, on local shards with a global norm."""

    def __init__(self, model, base, rho=0.05):
        self.model, self.base, self.rho = model, base, rho

    def _local(self):
        return [(p.to_local(), p.grad.to_local()) for p in self.model.parameters() if p.grad is not None]

    @torch.no_grad()
    def climb(self):
        pairs = self._local()
        total = torch.stack([g.double().square().sum() for _, g in pairs]).sum()
        dist.all_reduce(total)
        scale = self.rho / (total.sqrt().item() + 1e-12)
        self.before = [w.clone() for w, _ in pairs]
        for w, g in pairs:
            w.add_(g, alpha=scale)

    @torch.no_grad()
    def descend(self):
        for (w, _), old in zip(self._local(), self.before):
            w.copy_(old)
        del self.before
        self.base.step()

    def step(self, closure):
        self.base.zero_grad()
        loss = closure()
        self.climb()
        self.base.zero_grad()
        closure()
        self.descend()
        return loss


class Average:
    """Running mean of the weights over the last part of training, kept in float64 shards."""

    def __init__(self, model):
        self.model, self.count = model, 0
        self.sums = [torch.zeros_like(p.to_local(), dtype=torch.float64) for p in model.parameters()]

    @torch.no_grad()
    def add(self):
        self.count += 1
        for s, p in zip(self.sums, self.model.parameters()):
            s += p.to_local()

    @torch.no_grad()
    def swap_in(self):
        self.live = [p.to_local().clone() for p in self.model.parameters()]
        for s, p in zip(self.sums, self.model.parameters()):
            p.to_local().copy_(s / self.count)

    @torch.no_grad()
    def swap_out(self):
        for w, p in zip(self.live, self.model.parameters()):
            p.to_local().copy_(w)
        del self.live
