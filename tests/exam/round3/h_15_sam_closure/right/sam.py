import torch


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around SGD with momentum; step() needs a closure that does backward()."""

    def __init__(self, params, lr, rho=0.05, momentum=0.9):
        super().__init__(params, dict(lr=lr, rho=rho, momentum=momentum))

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm().full_tensor() for p in params]).norm() + 1e-12
            rho = self.param_groups[0]["rho"]
            kept = [p.detach().clone() for p in params]
            for p in params:
                p.add_(p.grad, alpha=(rho / norm).item())
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, k in zip(params, kept):
                p.copy_(k)
            for g in self.param_groups:
                for p in g["params"]:
                    buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    buf.mul_(g["momentum"]).add_(p.grad)
                    p.add_(buf, alpha=-g["lr"])
        return loss
