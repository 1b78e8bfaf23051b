import torch


class AdaBelief(torch.optim.Optimizer):
    """Second moment of the deviation from the expected gradient; elementwise, so it works shard by shard."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-6, decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, decay=decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                s["t"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                dev = p.grad - s["m"]
                s["v"].mul_(b2).addcmul_(dev, dev, value=1 - b2).add_(group["eps"])
                m = s["m"] / (1 - b1 ** s["t"])
                v = s["v"] / (1 - b2 ** s["t"])
                p.mul_(1 - group["lr"] * group["decay"])
                p.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-group["lr"])


class ShardEMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = [p.detach().to_local().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self):
        for a, p in zip(self.shadow, self.model.parameters()):
            a.lerp_(p.to_local(), 1 - self.decay)

    @torch.no_grad()
    def swap(self):
        for a, p in zip(self.shadow, self.model.parameters()):
            w = p.to_local()
            keep = w.clone()
            w.copy_(a)
            a.copy_(keep)
