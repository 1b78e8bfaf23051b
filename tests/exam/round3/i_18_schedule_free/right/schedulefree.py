import torch


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD. While training, the parameters hold y; eval() swaps in the average x, train() swaps back.

    x_{t+1} = (1 - c) x_t + c z_{t+1},   y = (1 - beta) z + beta x
    """

    def __init__(self, params, lr=0.1, beta=0.9, warmup=5, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, beta=beta, warmup=warmup, weight_decay=weight_decay, training=True))

    def _state(self, p):
        st = self.state[p]
        if "z" not in st:
            st["z"] = p.detach().clone()
            st["k"] = torch.zeros(())
            st["weight_sum"] = torch.zeros(())
        return st

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["training"]:
                for p in group["params"]:
                    p.lerp_(self._state(p)["z"], 1 - 1 / group["beta"])
                group["training"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["training"]:
                for p in group["params"]:
                    p.lerp_(self._state(p)["z"], 1 - group["beta"])
                group["training"] = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["training"], "call train() first"
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self._state(p)
                st["k"] += 1
                lr = group["lr"] * min(1.0, st["k"].item() / group["warmup"])
                weight = lr**2
                st["weight_sum"] += weight
                c = weight / max(st["weight_sum"].item(), 1e-20)
                grad = p.grad + group["weight_decay"] * p
                beta = group["beta"]
                p.lerp_(st["z"], c)
                p.add_(grad, alpha=lr * (beta * (1 - c) - 1))
                st["z"].sub_(grad, alpha=lr)
