"""LAMB for sharded parameters: Adam direction, rescaled per layer by |w| / |update|."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            todo = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                t = state["step"].item()
                w, g = local(p), local(p.grad)
                m, v = local(state["exp_avg"]), local(state["exp_avg_sq"])
                m.lerp_(g, 1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                update = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
                if p.ndim > 1:
                    update = update + group["weight_decay"] * w
                todo.append((p, w, update))
            if not todo:
                continue

            # one reduction per kind of norm for all layers
            w_sq = torch.stack([w.square().sum() for _, w, _ in todo])
            u_sq = torch.stack([u.square().sum() for _, _, u in todo])
            dist.all_reduce(w_sq)
            for (p, w, update), w_norm, u_norm in zip(todo, w_sq.sqrt(), u_sq.sqrt()):
                trust = torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, torch.ones(()))
                if p.ndim < 2:
                    trust = torch.ones(())
                w.sub_(group["lr"] * trust.clamp(max=10.0) * update)
