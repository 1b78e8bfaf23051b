import torch
from torch.distributed.tensor import DTensor


class ClippedAdam(torch.optim.Optimizer):
    """Adam whose update of a tensor is limited to a root mean square of `limit` (as in Adafactor)."""

    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-6, limit=0.7):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, limit=limit))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["mean"] = torch.zeros_like(p)
                    state["var"] = torch.zeros_like(p)
                state["step"] += 1
                t = state["step"].item()
                state["mean"].lerp_(p.grad, 1 - beta1)
                state["var"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = state["mean"] / (1 - beta1 ** t)
                update = update / ((state["var"] / (1 - beta2 ** t)).sqrt() + group["eps"])
                mean_square = update.square().sum()
                if isinstance(mean_square, DTensor):
                    mean_square = mean_square.full_tensor()
                rms = (mean_square.item() / p.numel()) ** 0.5
                p.add_(update, alpha=-group["lr"] / max(1.0, rms / group["limit"]))
