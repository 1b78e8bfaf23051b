"""Adafactor (factored second moments, no momentum) for parameters that FSDP2 shards along dim 0."""
import torch
import torch.distributed as dist


class Adafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, decay=0.8, eps=1e-30, clip=1.0):
        super().__init__(params, dict(lr=lr, decay=decay, eps=eps, clip=clip))

    @staticmethod
    def _total(t):
        dist.all_reduce(t)
        return t

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                weight, grad = p, p.grad
                if hasattr(p, "to_local"):
                    weight, grad = p.to_local(), p.grad.to_local()
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    if p.ndim == 2:
                        state["row"] = torch.zeros(weight.shape[0])
                        state["col"] = torch.zeros(weight.shape[1])
                    else:
                        state["v"] = torch.zeros_like(weight)
                state["step"] += 1
                beta = 1.0 - state["step"] ** -group["decay"]
                sq = grad.square() + group["eps"]

                if p.ndim == 2:
                    col_mean = sq.mean(dim=0)
                    state["row"].lerp_(sq.mean(dim=1), 1 - beta)
                    state["col"].lerp_(col_mean, 1 - beta)
                    row_mean = self._total(state["row"].sum()) / p.shape[0]
                    v = torch.outer(state["row"] / row_mean, state["col"])
                else:
                    state["v"].lerp_(sq, 1 - beta)
                    v = state["v"]

                update = grad * v.clamp_min(group["eps"]).rsqrt()
                rms = (self._total(update.square().sum()) / p.numel()).sqrt()
                update /= torch.clamp(rms / group["clip"], min=1.0)
                weight.add_(update, alpha=-group["lr"])
