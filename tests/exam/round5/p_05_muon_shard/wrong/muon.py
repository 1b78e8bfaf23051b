import torch
from torch.distributed.tensor import DTensor


def newton_schulz(g, iters=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.T
    for _ in range(iters):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


def orthogonalize(m):
    if not isinstance(m, DTensor):
        return newton_schulz(m)
    o = newton_schulz(m.to_local())
    return DTensor.from_local(o, m.device_mesh, m.placements, run_check=False, shape=m.shape, stride=m.stride())


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if "buf" not in st:
                    st["buf"] = torch.zeros_like(p)
                st["buf"].mul_(group["momentum"]).add_(p.grad)
                u = orthogonalize(p.grad.add(st["buf"], alpha=group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(u, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
