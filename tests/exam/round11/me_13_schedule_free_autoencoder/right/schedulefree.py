"""Schedule-free AdamW (Defazio et al., 2024).

The parameters hold y (where gradients are taken) while training and x (the
average) while evaluating; z is kept in the state. x is recovered from y and z.
"""
import torch


class ScheduleFreeAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=5e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.0, warmup=5):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, warmup=warmup,
                                      k=0, weight_sum=0.0, training=True))

    @torch.no_grad()
    def eval(self):
        for g in self.param_groups:
            if g["training"]:
                for p in g["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / g["betas"][0])
                g["training"] = False

    @torch.no_grad()
    def train(self):
        for g in self.param_groups:
            if not g["training"]:
                for p in g["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - g["betas"][0])
                g["training"] = True

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            assert g["training"], "call train() before step()"
            beta1, beta2 = g["betas"]
            lr = g["lr"] * min(1.0, (g["k"] + 1) / g["warmup"])
            g["weight_sum"] += lr**2
            c = lr**2 / g["weight_sum"]
            for p in g["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.detach().clone()
                    state["v"] = torch.zeros_like(p)
                z, v = state["z"], state["v"]
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denom = (v / (1 - beta2 ** (g["k"] + 1))).sqrt_().add_(g["eps"])
                update = p.grad / denom + g["weight_decay"] * p
                p.lerp_(z, c)
                p.add_(update, alpha=lr * (beta1 * (1 - c) - 1))
                z.sub_(update, alpha=lr)
            g["k"] += 1
