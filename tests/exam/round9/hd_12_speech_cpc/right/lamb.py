import torch


class LAMB(torch.optim.Optimizer):
    """Layer-wise adaptive Adam. The norms are those of whole parameters: a DTensor's norm is reduced over the ranks."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["step"] = torch.zeros(())
                    s["exp_avg"], s["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                s["step"] += 1
                s["exp_avg"].lerp_(p.grad, 1 - b1)
                s["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                t = s["step"].item()
                update = (s["exp_avg"] / (1 - b1**t)) / ((s["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"])
                update = update + group["weight_decay"] * p
                w_norm, u_norm = self.norm(p), self.norm(update)
                ratio = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
                p.add_(update, alpha=-group["lr"] * ratio)

    @staticmethod
    def norm(t):
        n = torch.linalg.vector_norm(t)
        return (n.full_tensor() if hasattr(n, "full_tensor") else n).item()
