import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def _local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class CautiousAdam(torch.optim.Optimizer):
    """Adam which takes only the coordinates whose update agrees in sign with the gradient.

    What is left of the update of a tensor is scaled up by one over the share of coordinates taken.
    Works on the local shards; state tensors are DTensors laid out as their parameters.
    """

    def __init__(self, params, group=None, lr=1e-3, betas=(0.9, 0.98), eps=1e-6, decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, decay=decay))
        self.group = group
        self.agreement = 0.0

    def _share(self, taken, numel):
        count = taken.sum()
        dist.all_reduce(count, group=self.group)
        return count / numel

    @torch.no_grad()
    def step(self, closure=None):
        taken_all, numel_all = 0.0, 0
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["step"] = torch.zeros(())
                    st["exp_avg"], st["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                st["step"] += 1
                t = st["step"].item()
                w, g = _local(p), _local(p.grad)
                m, v = _local(st["exp_avg"]), _local(st["exp_avg_sq"])
                m.lerp_(g, 1 - b1)
                v.mul_(b2).addcmul_(g, g, value=1 - b2)
                update = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
                taken = (update * g > 0).to(w.dtype)
                share = self._share(taken, p.numel())
                taken_all, numel_all = taken_all + share.item() * p.numel(), numel_all + p.numel()
                w.mul_(1 - group["lr"] * group["decay"])
                w.sub_(update * taken / share.clamp(min=1e-3), alpha=group["lr"])
        self.agreement = taken_all / max(1, numel_all)
