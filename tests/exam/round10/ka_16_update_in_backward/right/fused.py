import torch


class BackwardLion:
    """Lion whose update runs inside backward: as soon as a weight's reduced gradient is there it is used and dropped.

    There is no step() and no gradient ever waits for the whole backward. Rates differ by depth (`rates` maps a parameter
    name to a factor).
    """

    def __init__(self, model, lr, rates, betas=(0.9, 0.99), weight_decay=0.02):
        self.lr, self.rates, self.betas, self.weight_decay = lr, rates, betas, weight_decay
        self.momentum = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        self.updates = dict.fromkeys(self.momentum, 0)
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(self.hook_for(name))

    def hook_for(self, name):
        @torch.no_grad()
        def hook(p):
            b1, b2 = self.betas
            m, lr = self.momentum[name], self.lr * self.rates(name)
            direction = (b1 * m + (1 - b1) * p.grad).div(0.003).clamp(-1, 1)  # sign with a linear part around zero
            p.mul_(1 - lr * self.weight_decay).add_(direction, alpha=-lr)
            m.lerp_(p.grad, 1 - b2)
            p.grad = None
            self.updates[name] += 1

        return hook

    def state_dict(self):
        return {"momentum": self.momentum, "updates": self.updates}

    def load_state_dict(self, state):
        for n, m in self.momentum.items():
            m.copy_(state["momentum"][n])
        self.updates.update(state["updates"])
