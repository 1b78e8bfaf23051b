"""Row-wise Adagrad for embedding tables: one accumulator per row instead of one per weight.
The tables are sharded by rows, so a row and its accumulator live on the same rank."""

import torch


class RowwiseAdagrad(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, eps=1e-8, max_norm=None):
        super().__init__(params, dict(lr=lr, eps=eps, max_norm=max_norm))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = p.detach().pow(2).mean(dim=1).zero_()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                w, g = p.to_local(), p.grad.to_local()
                rows = self.state[p]["rows"].to_local()
                rows.add_(g.pow(2).mean(dim=1))
                w.sub_(group["lr"] * g / (rows.sqrt().unsqueeze(1) + group["eps"]))
                if group["max_norm"]:
                    norm = w.norm(dim=1, keepdim=True)
                    w.mul_((group["max_norm"] / norm.clamp(min=1e-12)).clamp(max=1.0))
