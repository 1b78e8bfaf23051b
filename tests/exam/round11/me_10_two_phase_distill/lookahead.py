import torch


class Lookahead:
    """Slow weights that follow the fast ones every k steps (Zhang et al., 2019)."""

    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.params = [p for g in optimizer.param_groups for p in g["params"]]
        self.slow = [p.detach().to_local().clone() for p in self.params]

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for p, s in zip(self.params, self.slow):
                s.lerp_(p.to_local(), self.alpha)
                p.to_local().copy_(s)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def state_dict(self):
        return {"inner": self.optimizer.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["inner"])
        self.count = state["count"]
        for s, t in zip(self.slow, state["slow"]):
            s.copy_(t)
