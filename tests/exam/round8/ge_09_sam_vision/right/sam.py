"""Sharpness-aware minimisation: the gradient is taken at the worst point of a small ball around the weights."""
import torch
import torch.distributed as dist


class SAM(torch.optim.Optimizer):
    """SGD with momentum at the heart, working on the local shards. `closure` computes loss and gradients.

    adaptive=True scales the ball by |w| (ASAM).
    """

    def __init__(self, params, lr, rho=0.05, momentum=0.9, weight_decay=0.0, adaptive=False):
        super().__init__(params, dict(lr=lr, rho=rho, momentum=momentum, weight_decay=weight_decay, adaptive=adaptive))

    def _each(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p, p.to_local(), p.grad.to_local()

    def _climb(self):
        square = torch.zeros(())
        for group, p, w, g in self._each():
            square += (w.abs() * g if group["adaptive"] else g).square().sum()
        dist.all_reduce(square)
        norm = square.sqrt() + 1e-12
        for group, p, w, g in self._each():
            self.state[p]["origin"] = w.clone()
            w.add_((w.square() * g if group["adaptive"] else g) * (group["rho"] / norm))
        return norm

    def _descend(self):
        for group, p, w, g in self._each():
            w.copy_(self.state[p].pop("origin"))
            d = g + group["weight_decay"] * w
            if "velocity" not in self.state[p]:
                self.state[p]["velocity"] = torch.zeros_like(w)
            v = self.state[p]["velocity"].mul_(group["momentum"]).add_(d)
            w.sub_(group["lr"] * v)

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        self.zero_grad()
        loss = closure()
        norm = self._climb()
        self.zero_grad()
        worst = closure()
        self._descend()
        return loss, worst, norm
