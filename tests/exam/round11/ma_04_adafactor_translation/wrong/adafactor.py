import torch
import torch.distributed as dist


class ShardedAdafactor(torch.optim.Optimizer):
    """Adafactor for parameters sharded along dim 0: factored second moments for matrices, no first moment."""

    def __init__(self, params, lr=1e-2, decay=0.8, eps=1e-30, clip=1.0):
        super().__init__(params, dict(lr=lr, decay=decay, eps=eps, clip=clip))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self._update(p, group)

    def _update(self, p, group):
        w, g = p.to_local(), p.grad.to_local()
        state = self.state[p]
        if not state:
            state["step"] = 0
            if p.dim() == 2:
                state["row"] = torch.zeros(g.shape[0])
                state["col"] = torch.zeros(g.shape[1])
            else:
                state["v"] = torch.zeros_like(g)
        state["step"] += 1
        beta = 1.0 - state["step"] ** -group["decay"]
        sq = g * g + group["eps"]
        if p.dim() == 2:
            rows = p.shape[0]
            col_mean = sq.mean(0)
            state["row"].lerp_(sq.mean(1), 1 - beta)
            state["col"].lerp_(col_mean, 1 - beta)
            row_mean = state["row"].sum() / rows
            dist.all_reduce(row_mean)
            update = g * (row_mean / state["row"]).sqrt()[:, None] * state["col"].rsqrt()[None, :]
        else:
            state["v"].lerp_(sq, 1 - beta)
            update = g * state["v"].rsqrt()
        sums = torch.stack([(update * update).sum(), (w * w).sum()])
        dist.all_reduce(sums)
        rms_update, rms_weight = (sums / p.numel()).sqrt()
        update = update / (rms_update / group["clip"]).clamp(min=1.0)
        w.sub_(update * group["lr"] * rms_weight.clamp(min=1e-3))
