import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def inverse_root(mat, power, eps):
    vals, vecs = torch.linalg.eigh(mat.double() + eps * torch.eye(len(mat), dtype=torch.float64))
    return (vecs * vals.clamp(min=eps).pow(-power) @ vecs.t()).float()


class OneSidedShampoo(torch.optim.Optimizer):
    """Shampoo with the right (input side) preconditioner only, on dim-0 sharded matrices.

    The statistic is R = sum_t G_t^T G_t over all rows of the gradient; the update is G R^(-1/2)
    row by row, so that each rank can apply it to its own rows.
    """

    def __init__(self, params, lr=0.05, momentum=0.9, beta2=0.95, eps=1e-4, refresh=2):
        super().__init__(params, dict(lr=lr, momentum=momentum, beta2=beta2, eps=eps, refresh=refresh))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                sharded = isinstance(p, DTensor)
                grad = p.grad.to_local() if sharded else p.grad
                data = p.to_local() if sharded else p
                st = self.state[p]
                if not st:
                    st["step"] = 0
                    st["momentum"] = torch.zeros_like(data)
                    if p.ndim == 2:
                        st["R"] = torch.zeros(p.shape[1], p.shape[1])
                        st["root"] = torch.eye(p.shape[1])
                if p.ndim == 2:
                    stat = grad.t() @ grad
                    if sharded:
                        dist.all_reduce(stat)
                    st["R"].mul_(group["beta2"]).add_(stat, alpha=1 - group["beta2"])
                    if st["step"] % group["refresh"] == 0:
                        correction = 1 - group["beta2"] ** (st["step"] + 1)
                        st["root"] = inverse_root(st["R"] / correction, 0.5, group["eps"])
                    update = grad @ st["root"]
                else:
                    update = grad
                st["momentum"].mul_(group["momentum"]).add_(update)
                data.add_(st["momentum"], alpha=-group["lr"])
                st["step"] += 1
