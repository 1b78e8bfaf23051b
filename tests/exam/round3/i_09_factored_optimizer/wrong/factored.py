"""A small Adafactor: factored second moments for matrices, full ones for vectors, no momentum."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class Factored(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, beta2=0.95, eps=1e-16, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, beta2=beta2, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p, group):
        w, g = (t.to_local() if isinstance(t, DTensor) else t for t in (p, p.grad))
        sq, b, state = g.square() + group["eps"], group["beta2"], self.state[p]
        state["step"] = state.get("step", 0) + 1
        correction = 1 - b ** state["step"]
        if p.ndim >= 2:
            if "row" not in state:
                state["row"], state["col"] = torch.zeros_like(w[:, 0]), torch.zeros_like(w[0])
            state["row"].lerp_(sq.mean(1), 1 - b)
            state["col"].lerp_(self._over_rows(sq, p), 1 - b)
            row, col = state["row"] / correction, state["col"] / correction
            v = torch.outer(row, col) / col.mean()
        else:
            if "v" not in state:
                state["v"] = torch.zeros_like(w)
            v = state["v"].lerp_(sq, 1 - b) / correction
        w.mul_(1 - group["lr"] * group["weight_decay"])
        w.addcdiv_(g, v.sqrt(), value=-group["lr"])

    def _over_rows(self, sq, p):
        return sq.sum(0) / sq.shape[0]
