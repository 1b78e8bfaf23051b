import torch


class Lion(torch.optim.Optimizer):
    """Lion with a soft sign (tanh), elementwise only, so it works on whatever shard it is given."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, soft=200.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, soft=soft))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            b1, b2 = g["betas"]
            for p in g["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["exp_avg"] = torch.zeros_like(p)
                m = st["exp_avg"]
                update = torch.tanh((b1 * m + (1 - b1) * p.grad) * g["soft"])
                p.mul_(1 - g["lr"] * g["weight_decay"]).add_(update, alpha=-g["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)
