"""Sophia-G: momentum, divided by a Gauss-Newton-Bartlett estimate of the diagonal Hessian, clipped."""

import torch


class SophiaG(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.95), rho=0.05, weight_decay=0.0, eps=1e-12):
        super().__init__(params, dict(lr=lr, betas=betas, rho=rho, weight_decay=weight_decay, eps=eps))

    @torch.no_grad()
    def update_hessian(self, batch_size):
        """Call after a backward pass over labels that were sampled from the model itself."""
        for group in self.param_groups:
            b2 = group["betas"][1]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if "hess" not in st:
                    st["hess"] = torch.zeros_like(p)
                st["hess"].mul_(b2).addcmul_(p.grad, p.grad, value=(1 - b2) * batch_size)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, lr = group["betas"][0], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if "m" not in st:
                    st["m"] = torch.zeros_like(p)
                st["m"].lerp_(p.grad, 1 - b1)
                p.mul_(1 - lr * group["weight_decay"])
                scale = group["rho"] * st["hess"] + group["eps"]
                p.sub_(lr * (st["m"] / scale).clamp(-1.0, 1.0))
