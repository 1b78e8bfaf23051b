"""Adafactor (no first moment, fixed lr) for parameters sharded on dim 0."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class ShardedAdafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, decay=0.8, eps=1e-30, clip=1.0):
        super().__init__(params, dict(lr=lr, decay=decay, eps=eps, clip=clip))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                g, w = local(p.grad), local(p)
                if not state:
                    state["step"] = 0
                    if p.ndim == 2:
                        # one entry per row of our own shard, one per column of the whole matrix
                        state["row"] = g.new_zeros(g.shape[0])
                        state["col"] = g.new_zeros(g.shape[1])
                    else:
                        state["v"] = torch.zeros_like(g)
                state["step"] += 1
                beta = 1.0 - state["step"] ** -group["decay"]
                g2 = g.square() + group["eps"]
                if p.ndim == 2:
                    rows = p.shape[0]
                    col = g2.sum(dim=0)
                    dist.all_reduce(col)
                    state["row"].lerp_(g2.mean(dim=1), 1 - beta)
                    state["col"].lerp_(col / rows, 1 - beta)
                    mean = state["col"].mean()
                    update = g * (mean / state["row"]).sqrt()[:, None] * state["col"].rsqrt()[None, :]
                else:
                    state["v"].lerp_(g2, 1 - beta)
                    update = g * state["v"].rsqrt()
                sq = update.square().sum()
                dist.all_reduce(sq)
                rms = (sq / p.numel()).sqrt()
                update = update / torch.clamp(rms / group["clip"], min=1.0)
                w.add_(update, alpha=-group["lr"])
