"""Adafactor (Shazeer & Stern, 2018) for parameters sharded along dim 0.

The second moment of a matrix is kept as a row vector (sharded like the rows of
the parameter) and a column vector (the same on every rank).
"""
import torch
import torch.distributed as dist


class Adafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=2e-2, beta2=0.95, eps=1e-30, clip=1.0, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, beta2=beta2, eps=eps, clip=clip, weight_decay=weight_decay))

    @staticmethod
    def _all_sum(t):
        dist.all_reduce(t)
        return t

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self._update(p, group)

    def _update(self, p, group):
        g = p.grad.to_local()
        w = p.to_local()
        sq = g.square() + group["eps"]
        state = self.state[p]
        if not state:
            state["step"] = 0
            if p.ndim == 2:
                state["row"] = torch.zeros(g.shape[0])
                state["col"] = torch.zeros(g.shape[1])
            else:
                state["v"] = torch.zeros_like(g)
        state["step"] += 1
        beta2 = group["beta2"]
        correction = 1 - beta2 ** state["step"]

        if p.ndim == 2:
            rows = p.shape[0]
            row = sq.mean(dim=1)
            col = sq.mean(dim=0)
            state["row"].lerp_(row, 1 - beta2)
            state["col"].lerp_(col, 1 - beta2)
            row_mean = self._all_sum(state["row"].sum()) / rows
            v = torch.outer(state["row"] / row_mean, state["col"]) / correction
        else:
            state["v"].lerp_(sq, 1 - beta2)
            v = state["v"] / correction

        update = g * v.rsqrt()
        rms = (self._all_sum(update.square().sum()) / p.numel()).sqrt()
        update.div_(torch.clamp(rms / group["clip"], min=1.0))
        if group["weight_decay"]:
            w.mul_(1 - group["lr"] * group["weight_decay"])
        w.add_(update, alpha=-group["lr"])
