import math

import torch


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """Schedule-free AdamW. While training, the parameters hold y, the point at which gradients are taken;
    `eval()` turns them into x, the average that is used for prediction; `train()` goes back. The state holds z."""

    def __init__(self, params, lr=5e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, warmup=5):
        super().__init__(params, dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, warmup=warmup))
        self.training = True
        for group in self.param_groups:
            group.setdefault("k", 0)
            group.setdefault("weight_sum", 0.0)
            for p in group["params"]:
                self.state[p]["z"] = p.detach().clone()
                self.state[p]["v"] = torch.zeros_like(p)

    @torch.no_grad()
    def _move(self, weight_of):
        for group in self.param_groups:
            w = weight_of(group["beta1"])
            for p in group["params"]:
                p.lerp_(self.state[p]["z"], w)

    def eval(self):
        if self.training:
            self._move(lambda b: 1 - 1 / b)
            self.training = False

    def train(self):
        if not self.training:
            self._move(lambda b: 1 - b)
            self.training = True

    @torch.no_grad()
    def step(self):
        assert self.training
        for group in self.param_groups:
            k = group["k"] + 1
            b1, b2 = group["beta1"], group["beta2"]
            lr = group["lr"] * min(1.0, k / group["warmup"]) * math.sqrt(1 - b2**k)
            weight = lr * lr
            group["weight_sum"] += weight
            c = weight / group["weight_sum"]
            for p in group["params"]:
                z, v = self.state[p]["z"], self.state[p]["v"]
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                update = p.grad / (v.sqrt() + group["eps"])
                update.add_(p, alpha=group["weight_decay"])
                # y moves towards the new average and by the interpolated step, z by the whole one
                p.lerp_(z, c)
                p.add_(update, alpha=lr * (b1 * (1 - c) - 1))
                z.sub_(update, alpha=lr)
            group["k"] = k
