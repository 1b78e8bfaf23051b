import torch


class Lookahead:
    """Slow weights pulled towards the fast ones every k steps (Zhang et al. 2019)."""

    def __init__(self, fast, k=4, alpha=0.5):
        self.fast, self.k, self.alpha, self.count = fast, k, alpha, 0
        self.params = [p for g in fast.param_groups for p in g["params"]]
        self.slow = [p.detach().clone() for p in self.params]

    def zero_grad(self):
        self.fast.zero_grad()

    @torch.no_grad()
    def step(self):
        self.fast.step()
        self.count += 1
        if self.count % self.k == 0:
            for s, p in zip(self.slow, self.params):
                s.lerp_(p, self.alpha)
                p.copy_(s)

    def state_dict(self):
        return {"fast": self.fast.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, sd):
        self.fast.load_state_dict(sd["fast"])
        with torch.no_grad():
            for s, v in zip(self.slow, sd["slow"]):
                s.copy_(v)
        self.count = sd["count"]
