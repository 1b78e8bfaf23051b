import torch
from torch.distributed.tensor import DTensor


def whole_norm(t):
    n = torch.linalg.vector_norm(t)
    return n.full_tensor().item() if isinstance(n, DTensor) else n.item()


class Lamb(torch.optim.Optimizer):
    """trust ratios from the norms of whole tensors, moments kept sharded"""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["step"] = torch.tensor(0.0)
                    st["m"], st["v"] = torch.zeros_like(p), torch.zeros_like(p)
                st["step"] += 1
                t = st["step"].item()
                st["m"].lerp_(p.grad, 1 - b1)
                st["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                u = (st["m"] / (1 - b1 ** t)) / ((st["v"] / (1 - b2 ** t)).sqrt() + group["eps"])
                u = u + group["weight_decay"] * p
                wn, un = whole_norm(p), whole_norm(u)
                trust = wn / un if wn > 0 and un > 0 else 1.0
                p.add_(u, alpha=-group["lr"] * min(trust, 10.0))
