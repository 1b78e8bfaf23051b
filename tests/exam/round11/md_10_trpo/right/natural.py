"""Conjugate gradient and line search on lists of DTensor shards."""
import torch
import torch.distributed as dist


def inner(a, b):
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(a, b):
        total += (x.to_local().double() * y.to_local().double()).sum()
    dist.all_reduce(total)
    return total.item()


def norm(a):
    return inner(a, a) ** 0.5


@torch.no_grad()
def set_params(params, base, direction=None, scale=0.0):
    for i, p in enumerate(params):
        p.copy_(base[i] if direction is None else base[i] + scale * direction[i])


def gradient(params, loss_fn):
    for p in params:
        p.grad = None
    loss_fn().backward()
    out = [p.grad.detach().clone() for p in params]
    for p in params:
        p.grad = None
    return out


class FisherProduct:
    """F v by a central difference of the gradient of the KL divergence around the old policy."""

    def __init__(self, params, kl_fn, damping=0.05, eps=1e-4):
        self.params, self.kl_fn, self.damping, self.eps = params, kl_fn, damping, eps
        self.base = [p.detach().clone() for p in params]

    def __call__(self, v):
        h = self.eps / max(norm(v), 1e-12)
        set_params(self.params, self.base, v, h)
        up = gradient(self.params, self.kl_fn)
        set_params(self.params, self.base, v, -h)
        down = gradient(self.params, self.kl_fn)
        set_params(self.params, self.base)
        return [(u - d) / (2 * h) + self.damping * x for u, d, x in zip(up, down, v)]


@torch.no_grad()
def conjugate_gradient(product, b, iterations):
    x = [torch.zeros_like(t) for t in b]
    r = [t.clone() for t in b]
    p = [t.clone() for t in b]
    rr = inner(r, r)
    for _ in range(iterations):
        with torch.enable_grad():
            ap = product(p)
        alpha = rr / inner(p, ap)
        x = [xi + alpha * pi for xi, pi in zip(x, p)]
        r = [ri - alpha * ai for ri, ai in zip(r, ap)]
        new = inner(r, r)
        p = [ri + (new / rr) * pi for ri, pi in zip(r, p)]
        rr = new
    return x
