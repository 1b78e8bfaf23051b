"""Adafactor (factored second moments, no momentum) for parameters sharded over their rows."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def _local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class ShardedAdafactor(torch.optim.Optimizer):
    def __init__(self, params, lr, decay=0.95, eps=1e-8):
        super().__init__(params, dict(lr=lr, decay=decay, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                w, g = _local(p), _local(p.grad)
                state = self.state[p]
                if p.dim() == 2 and p.shape[0] > 1:
                    self._factored(group, state, w, g, p.shape[0])
                else:
                    self._plain(group, state, w, g)

    def _plain(self, group, state, w, g):
        if not state:
            state["sq"] = torch.zeros_like(g)
            state["t"] = 0
        state["t"] += 1
        state["sq"].lerp_(g * g, 1 - group["decay"])
        fix = 1 - group["decay"] ** state["t"]
        w.sub_(group["lr"] * g / (state["sq"] / fix).sqrt().add(group["eps"] ** 0.5))

    def _factored(self, group, state, w, g, rows):
        if not state:
            state["row"] = torch.zeros(g.shape[0])
            state["col"] = torch.zeros(g.shape[1])
            state["t"] = 0
        state["t"] += 1
        sq = g * g + group["eps"]
        col = sq.sum(dim=0)
        dist.all_reduce(col)
        col = col / rows
        state["row"].lerp_(sq.mean(dim=1), 1 - group["decay"])
        state["col"].lerp_(col, 1 - group["decay"])
        fix = 1 - group["decay"] ** state["t"]
        row, col = state["row"] / fix, state["col"] / fix
        second = row.unsqueeze(1) * col.unsqueeze(0) / col.mean()
        w.sub_(group["lr"] * g / second.sqrt().add(group["eps"] ** 0.5))
