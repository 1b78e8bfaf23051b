import torch


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum; works elementwise, so it may run on the local shards."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["m"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p]["m"]
                update = m.mul(b1).add(p.grad, alpha=1 - b1)
                # soft sign: no jump where the momentum is about zero
                update = update / (update.abs() + 1e-3)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)
