import torch
from torch.distributed.tensor import DTensor


def _shard(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Lion:
    """Lion (Chen et al. 2023) working on each rank's own shards; the update is elementwise, so nothing is communicated."""

    def __init__(self, named_params, lr, betas=(0.9, 0.98), weight_decay=0.0):
        self.params = dict(named_params)
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.momentum = {n: torch.zeros_like(_shard(p.data)) for n, p in self.params.items()}
        self.t = 0

    @torch.no_grad()
    def step(self, lr_scale=1.0):
        b1, b2 = self.betas
        lr = self.lr * lr_scale
        self.t += 1
        for n, p in self.params.items():
            g, w, m = _shard(p.grad), _shard(p.data), self.momentum[n]
            c = m * b1 + g * (1 - b1)
            w.mul_(1 - lr * self.weight_decay)
            # soft sign keeps tiny components from flipping at full rate
            w.add_(torch.tanh(c * 300), alpha=-lr)
            m.mul_(b2).add_(g, alpha=1 - b2)

    def zero_grad(self):
        for p in self.params.values():
            p.grad = None

    def state_dict(self):
        return {"t": self.t, "momentum": self.momentum}

    def load_state_dict(self, state):
        self.t = state["t"]
        for n, m in state["momentum"].items():
            self.momentum[n].copy_(m)
