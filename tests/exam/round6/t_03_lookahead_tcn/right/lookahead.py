"""Lookahead around AdamW: every k steps the slow weights move alpha of the way to the fast ones."""
import torch


class LookaheadAdamW(torch.optim.AdamW):
    def __init__(self, params, k=5, alpha=0.5, **kw):
        super().__init__(params, **kw)
        self.k, self.alpha = k, alpha
        self.inner = 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.inner += 1
        if self.inner % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow):
                for p, s in zip(group["params"], slow):
                    s.lerp_(p, self.alpha)
                    p.copy_(s)

    def state_dict(self):
        sd = super().state_dict()
        sd["lookahead"] = {"inner": self.inner, "slow": self.slow}
        return sd

    @torch.no_grad()
    def load_state_dict(self, sd):
        sd = dict(sd)
        extra = sd.pop("lookahead")
        super().load_state_dict(sd)
        self.inner = extra["inner"]
        for mine, saved in zip(self.slow, extra["slow"]):
            for m, s in zip(mine, saved):
                m.copy_(s)
