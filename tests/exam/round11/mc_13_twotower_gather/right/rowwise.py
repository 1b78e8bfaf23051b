import torch


class RowwiseAdagrad(torch.optim.Optimizer):
    """One accumulator per embedding row. The tables are sharded by rows, so a row is always whole on its rank."""

    def __init__(self, params, lr=0.05, eps=1e-5):
        super().__init__(params, dict(lr=lr, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                w, g = p.to_local(), p.grad.to_local()
                state = self.state[p]
                if "rows" not in state:
                    state["rows"] = torch.zeros(w.shape[0], 1)
                acc = state["rows"]
                acc.add_(g.square().mean(dim=1, keepdim=True))
                w.sub_(group["lr"] * g / (acc.sqrt() + group["eps"]))
