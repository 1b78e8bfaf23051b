import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def orthogonalise(m, steps=5):
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = m.shape[0] > m.shape[1]
    x = m.T if tall else m
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class MuonWithAdam(torch.optim.Optimizer):
    """Muon for the hidden matrices, Adam for the rest, in one optimizer. The momentum is sharded as its
    parameter; it is gathered for the orthogonalisation and each rank applies its shard of the result."""

    def __init__(self, matrices, others, muon_lr=0.02, momentum=0.9, adam_lr=3e-3, betas=(0.9, 0.95), eps=1e-6):
        groups = [dict(params=list(matrices), muon=True, lr=muon_lr, momentum=momentum, betas=betas, eps=eps),
                  dict(params=list(others), muon=False, lr=adam_lr, momentum=momentum, betas=betas, eps=eps)]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    (self._muon if group["muon"] else self._adam)(p, group)

    def _muon(self, p, group):
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        buf = state["momentum"]
        buf.mul_(group["momentum"]).add_(p.grad)
        direction = p.grad.add(buf, alpha=group["momentum"])
        if isinstance(direction, DTensor):
            update = orthogonalise(direction.full_tensor())
            update = distribute_tensor(update, p.device_mesh, p.placements)
        else:
            update = orthogonalise(direction)
        scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        p.add_(update, alpha=-group["lr"] * scale)

    def _adam(self, p, group):
        state = self.state[p]
        if "count" not in state:
            state.update(count=torch.zeros(()), m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["count"] += 1
        t, (b1, b2) = state["count"].item(), group["betas"]
        state["m"].lerp_(p.grad, 1 - b1)
        state["v"].lerp_(p.grad * p.grad, 1 - b2)
        m, v = state["m"] / (1 - b1 ** t), state["v"] / (1 - b2 ** t)
        p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))
