from functools import partial

import torch


class AdamInBackward:
    """Adam which updates each shard in the hook that fires once its reduced gradient is in place.

    No gradient outlives the backward pass, so the peak memory holds the gradients of one layer only.
    """

    def __init__(self, named_parameters, betas=(0.9, 0.99), eps=1e-6):
        self.betas, self.eps = betas, eps
        self.t, self.lr = 0, 0.0
        self.mean, self.square = {}, {}
        for name, p in named_parameters:
            self.mean[name] = torch.zeros_like(p)
            self.square[name] = torch.zeros_like(p)
            p.register_post_accumulate_grad_hook(partial(self._update, name))

    def begin(self, lr):
        self.t += 1
        self.lr = lr

    @torch.no_grad()
    def _update(self, name, p):
        b1, b2 = self.betas
        g, w = p.grad.to_local(), p.to_local()
        m, v = self.mean[name].to_local(), self.square[name].to_local()
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        denominator = (v / (1 - b2 ** self.t)).sqrt_().add_(self.eps)
        w.addcdiv_(m, denominator, value=-self.lr / (1 - b1 ** self.t))
        p.grad = None

    def state_dict(self):
        return {"mean": self.mean, "square": self.square, "t": self.t}

    def load_state_dict(self, state):
        self.mean, self.square, self.t = state["mean"], state["square"], state["t"]
