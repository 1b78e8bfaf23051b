"""Adam steps taken inside of the backward pass, parameter by parameter; gradients never live longer than their layer."""
import torch


class BackwardAdam:
    def __init__(self, named_params, lr, betas=(0.9, 0.98), eps=1e-8):
        self.params = dict(named_params)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.slots = {n: {"t": 0, "m": torch.zeros_like(p.to_local()), "v": torch.zeros_like(p.to_local())}
                      for n, p in self.params.items()}
        for n, p in self.params.items():
            p.register_post_accumulate_grad_hook(self._hook(n))

    def _hook(self, name):
        @torch.no_grad()
        def apply(p):
            s, (b1, b2) = self.slots[name], self.betas
            g = p.grad.to_local()
            s["t"] += 1
            s["m"].lerp_(g, 1 - b1)
            s["v"].lerp_(g * g, 1 - b2)
            m = s["m"] / (1 - b1 ** s["t"])
            v = s["v"] / (1 - b2 ** s["t"])
            p.detach().to_local().sub_(self.lr * m / (v.sqrt() + self.eps))
            p.grad = None
        return apply

    def state_dict(self):
        return self.slots

    def load_state_dict(self, slots):
        self.slots = slots
