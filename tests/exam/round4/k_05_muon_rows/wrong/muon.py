"""Muon for matrices: momentum, then a Newton-Schulz iteration that orthogonalises the update."""
import torch


def orthogonalise(m, iterations=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (m.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.T
    for _ in range(iterations):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                nesterov = p.grad.add(buf, alpha=group["momentum"])
                rows, cols = p.shape
                update = orthogonalise(nesterov.to_local())
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.to_local().add_(update, alpha=-group["lr"] * max(1.0, rows / cols) ** 0.5)
