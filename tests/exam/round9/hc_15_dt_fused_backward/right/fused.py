import torch
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class FusedAdam:
    """Updates each parameter as soon as its gradient is complete and frees the gradient, so that
    the gradients of the whole model never exist at once. Elementwise clipping instead of a norm."""

    def __init__(self, named, lr, betas=(0.9, 0.95), eps=1e-6, clip=0.05, decay=0.01):
        self.params = dict(named)
        self.lr, self.betas, self.eps, self.clip, self.decay = lr, betas, eps, clip, decay
        self.t = 0
        self.state = {n: (torch.zeros_like(local(p)), torch.zeros_like(local(p))) for n, p in self.params.items()}
        for name, p in self.params.items():
            p.register_post_accumulate_grad_hook(self._hook(name))

    def begin(self, lr_scale):
        """To be called before the backward of a step."""
        self.t += 1
        self.scale = lr_scale

    def _hook(self, name):
        @torch.no_grad()
        def update(p):
            m, v = self.state[name]
            b1, b2 = self.betas
            g = local(p.grad).clamp(-self.clip, self.clip)
            m.lerp_(g, 1 - b1)
            v.lerp_(g * g, 1 - b2)
            w = local(p.data)
            lr = self.lr * self.scale
            if p.ndim > 1:
                w.mul_(1 - lr * self.decay)
            w.addcdiv_(m / (1 - b1 ** self.t), (v / (1 - b2 ** self.t)).sqrt() + self.eps, value=-lr)
            p.grad = None
        return update

    def state_dict(self):
        return {"t": self.t, "state": self.state}

    def load_state_dict(self, s):
        self.t = s["t"]
        for n, (m, v) in self.state.items():
            m.copy_(s["state"][n][0])
            v.copy_(s["state"][n][1])
