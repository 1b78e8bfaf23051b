"""Optimizer in backward: each parameter is updated as soon as its reduced gradient is
there, and the gradient is freed at once."""
import torch


class HookedAdam:
    def __init__(self, named_params, lr, betas=(0.9, 0.98), eps=1e-6):
        self.lr, self.betas, self.eps = lr, betas, eps
        self.scale = 1.0
        self.params = dict(named_params)
        self.state = {n: {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0} for n, p in self.params.items()}
        for name, p in self.params.items():
            p.register_post_accumulate_grad_hook(self.make_hook(name))

    def make_hook(self, name):
        @torch.no_grad()
        def hook(p):
            s = self.state[name]
            s["t"] += 1
            b1, b2 = self.betas
            s["m"].lerp_(p.grad, 1 - b1)
            s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            m_hat = s["m"] / (1 - b1 ** s["t"])
            v_hat = s["v"] / (1 - b2 ** s["t"])
            p.sub_(self.lr * self.scale * m_hat / (v_hat.sqrt() + self.eps))
            p.grad = None

        return hook
