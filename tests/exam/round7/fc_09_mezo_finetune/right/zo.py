"""Zeroth-order training (MeZO): two forwards with the weights moved along a random direction, no backward at all."""
import torch
from torch.distributed.tensor import DTensor


class Mezo:
    """Every rank regenerates the full direction of a parameter from (seed, step, index) and uses the rows of its shard."""

    def __init__(self, model, lr, eps, seed, momentum=0.9):
        self.model, self.lr, self.eps, self.seed = model, lr, eps, seed
        self.momentum = momentum
        self.scalar = 0.0          # smoothed projected gradient, for the log and the step-size guard
        self.step_no = 0

    def _direction(self, index, p):
        g = torch.Generator().manual_seed((self.seed * 1_000_003 + self.step_no) * 1009 + index)
        z = torch.randn(p.shape, generator=g)
        if not isinstance(p, DTensor):
            return z
        rows = z.chunk(p.device_mesh.size(), dim=0)
        r = p.device_mesh.get_local_rank()
        return rows[r] if r < len(rows) else z[:0]

    def _locals(self):
        for i, p in enumerate(self.model.parameters()):
            yield i, p, (p.to_local() if isinstance(p, DTensor) else p.data)

    @torch.no_grad()
    def step(self, closure):
        start = [w.clone() for _, _, w in self._locals()]
        losses = []
        for sign in (1.0, -1.0):
            for (i, p, w), w0 in zip(self._locals(), start):
                torch.add(w0, self._direction(i, p), alpha=sign * self.eps, out=w)
            losses.append(closure())
        grad = (losses[0] - losses[1]) / (2 * self.eps)
        self.scalar = self.momentum * self.scalar + (1 - self.momentum) * abs(grad)
        # guard: never a longer step than three times the usual one
        limit = 3 * self.scalar if self.step_no > 5 else abs(grad)
        grad = max(-limit, min(limit, grad))
        for (i, p, w), w0 in zip(self._locals(), start):
            torch.add(w0, self._direction(i, p), alpha=-self.lr * grad, out=w)
        self.step_no += 1
        return 0.5 * (losses[0] + losses[1])

    def state_dict(self):
        return {"scalar": self.scalar, "step_no": self.step_no}

    def load_state_dict(self, d):
        self.scalar, self.step_no = d["scalar"], d["step_no"]
