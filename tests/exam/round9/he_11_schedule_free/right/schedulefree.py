"""Schedule-free AdamW: the weights trained on (y) and the averaged weights evaluated (x) are different points."""
import torch


class ScheduleFreeAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, beta=0.9, beta2=0.99, eps=1e-8, weight_decay=1e-3, warmup=4):
        super().__init__(params, dict(lr=lr, beta=beta, beta2=beta2, eps=eps, weight_decay=weight_decay, warmup=warmup))
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                s["step"] = torch.zeros(())
                s["weight_sum"] = torch.zeros(())
                s["x"] = p.detach().clone()
                s["z"] = p.detach().clone()
                s["v"] = torch.zeros_like(p)

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["x"])

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            for p in group["params"]:
                self._set_y(p, group["beta"])

    def _set_y(self, p, beta):
        s = self.state[p]
        p.copy_(beta * s["x"] + (1 - beta) * s["z"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                s["step"] += 1
                t = s["step"].item()
                lr = group["lr"] * min(1.0, t / group["warmup"])
                s["v"].mul_(group["beta2"]).addcmul_(p.grad, p.grad, value=1 - group["beta2"])
                denom = (s["v"] / (1 - group["beta2"] ** t)).sqrt() + group["eps"]
                s["z"].sub_(lr * (p.grad / denom + group["weight_decay"] * p))
                s["weight_sum"] += lr**2
                c = lr**2 / s["weight_sum"].item()
                s["x"].mul_(1 - c).add_(s["z"], alpha=c)
                self._set_y(p, group["beta"])
