import torch
import torch.distributed as dist


class Lookahead:
    """Every k steps: slow weights move halfway to the fast ones, which start again there."""

    def __init__(self, model, k=5, alpha=0.5):
        self.params, self.k, self.alpha = dict(model.named_parameters()), k, alpha
        self.slow = {n: p.detach().clone() for n, p in self.params.items()}

    @torch.no_grad()
    def after(self, engine, result):
        if engine.step % self.k == 0:
            for n, p in self.params.items():
                self.slow[n].lerp_(p, self.alpha)
                p.copy_(self.slow[n])


class TriangularLR:
    def __init__(self, opt, low, high, period):
        self.opt, self.low, self.high, self.period = opt, low, high, period

    def before(self, engine):
        pos = (engine.step % self.period) / self.period
        for g in self.opt.param_groups:
            g["lr"] = self.low + (self.high - self.low) * (1 - abs(2 * pos - 1))


class Log:
    def after(self, engine, loss):
        v = loss.detach() / dist.get_world_size()
        dist.all_reduce(v)
        if dist.get_rank() == 0:
            print(f"step {engine.step} loss {v.item():.5f}", flush=True)
