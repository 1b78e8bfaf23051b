import math

import torch


class ZClip:
    """Clips steps whose gradient norm is an outlier of the running statistics. The norm is that of the whole
    gradient, so all ranks keep the same statistics."""

    def __init__(self, limit, warmup, alpha=0.9):
        self.limit, self.warmup, self.alpha = limit, warmup, alpha
        self.mean, self.var, self.count, self.clipped = 0.0, 0.0, 0, 0

    def __call__(self, params):
        params = [p for p in params if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params]).full_tensor().item()
        used = norm
        if self.count >= self.warmup:
            std = math.sqrt(self.var) + 1e-8
            z = (norm - self.mean) / std
            if z > self.limit:
                used = self.mean + std * self.limit**2 / z
                torch._foreach_mul_([p.grad for p in params], used / norm)
                self.clipped += 1
        a = self.alpha if self.count else 0.0
        delta = used - self.mean
        self.mean += (1 - a) * delta
        self.var = a * (self.var + (1 - a) * delta**2)
        self.count += 1
        return norm

    def state_dict(self):
        return {k: getattr(self, k) for k in ("mean", "var", "count", "clipped")}

    def load_state_dict(self, sd):
        self.__dict__.update(sd)


class Patience:
    def __init__(self, limit):
        self.limit, self.best, self.bad = limit, math.inf, 0

    def give_up(self, value):
        self.best, self.bad = (value, 0) if value < self.best else (self.best, self.bad + 1)
        return self.bad >= self.limit

    def state_dict(self):
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, sd):
        self.best, self.bad = sd["best"], sd["bad"]
