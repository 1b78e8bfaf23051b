import torch


class ScheduleFreeAdam(torch.optim.Optimizer):
    """Adam without a learning rate schedule (after Defazio et al.).

    While training the parameters hold y, where gradients are taken; `averaged()` moves them to x, the running average
    which is the result of the training, and `resume()` back. z is the sequence of plain Adam steps.
    """

    def __init__(self, params, lr, betas=(0.9, 0.98), eps=1e-6, warmup=4):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, warmup=warmup))
        self.count, self.weight_sum = 0, 0.0
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"z": p.detach().to_local().clone(), "v": torch.zeros_like(p.detach().to_local())}

    def _each(self):
        for group in self.param_groups:
            for p in group["params"]:
                yield group, p, self.state[p]

    @torch.no_grad()
    def step(self):
        self.count += 1
        first = self.param_groups[0]
        lr = first["lr"] * min(1.0, self.count / first["warmup"])
        self.weight_sum += lr**2
        c = lr**2 / self.weight_sum
        for group, p, s in self._each():
            b1, b2 = group["betas"]
            y, g = p.to_local(), p.grad.to_local()
            s["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
            direction = g / ((s["v"] / (1 - b2**self.count)).sqrt() + group["eps"])
            y.lerp_(s["z"], c).sub_(direction, alpha=lr * (1 - b1 * (1 - c)))
            s["z"].sub_(direction, alpha=lr)

    @torch.no_grad()
    def averaged(self):
        for group, p, s in self._each():
            y = p.to_local()
            s["y"] = y.clone()
            y.lerp_(s["z"], 1 - 1 / group["betas"][0])

    @torch.no_grad()
    def resume(self):
        for _, p, s in self._each():
            p.to_local().copy_(s.pop("y"))
