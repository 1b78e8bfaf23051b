import torch
import torch.distributed as dist


@torch.no_grad()
def clip_by_global_norm(params, max_norm):
    """Scales the gradients of a sharded model so that their joint norm is at most max_norm."""
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    total = sum(g.double().square().sum() for g in grads)
    dist.all_reduce(total)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
    for g in grads:
        g.mul_(scale)
    return norm.item()


class HeavyBall(torch.optim.Optimizer):
    """SGD with momentum and decoupled weight decay."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(p)
                state["velocity"].mul_(group["momentum"]).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["velocity"], alpha=-group["lr"])
