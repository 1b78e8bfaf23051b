import torch


class Lookahead:
    """k steps of the inner optimizer, then the slow weights move a part of the way and the fast ones go back to them."""

    def __init__(self, inner, k=5, alpha=0.5):
        self.inner, self.k, self.alpha = inner, k, alpha
        self.count = 0
        self.params = [p for group in inner.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.params]

    def zero_grad(self):
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.count += 1
        if self.count % self.k == 0:
            for slow, p in zip(self.slow, self.params):
                slow.lerp_(p.detach(), self.alpha)
                p.copy_(slow)

    def extra_state(self):
        state = {f"slow.{i}": s for i, s in enumerate(self.slow)}
        state["count"] = self.count
        return state

    @torch.no_grad()
    def load_extra_state(self, state):
        self.count = state["count"]
        for i, s in enumerate(self.slow):
            s.copy_(state[f"slow.{i}"])
