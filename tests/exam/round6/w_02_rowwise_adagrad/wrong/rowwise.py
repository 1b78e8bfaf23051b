import torch


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of an embedding table (as in DLRM / FBGEMM)."""

    def __init__(self, params, lr=0.1, eps=1e-8):
        super().__init__(params, dict(lr=lr, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                local, grad = p.to_local(), p.grad.to_local()
                if not state:
                    state["sum"] = torch.zeros(local.shape[0])
                state["sum"] += grad.square().mean(dim=1)
                local.addcdiv_(grad, (state["sum"].sqrt() + group["eps"])[:, None], value=-group["lr"])
