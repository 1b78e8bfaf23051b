"""Sharpness-aware minimisation around a momentum step, with slow (lookahead) weights."""
import torch
import torch.distributed as dist


class SharpLookahead(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, momentum=0.9, rho=0.05, every=4, pull=0.5):
        super().__init__(params, dict(lr=lr, momentum=momentum, rho=rho))
        self.every, self.pull, self.calls = every, pull, 0
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"buf": torch.zeros_like(p.to_local()), "slow": p.detach().to_local().clone()}

    def _each(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p.detach().to_local(), p.grad.to_local(), self.state[p]

    def _grad_norm(self):
        total = torch.zeros(())
        for _, _, g, _ in self._each():
            total += g.pow(2).sum()
        dist.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        scale = self._grad_norm() + 1e-12
        for group, w, g, st in self._each():
            st["kept"] = w.clone()
            w.add_(g * (group["rho"] / scale))
        with torch.enable_grad():
            closure()
        self.calls += 1
        for group, w, g, st in self._each():
            w.copy_(st.pop("kept"))
            st["buf"].mul_(group["momentum"]).add_(g)
            w.add_(st["buf"], alpha=-group["lr"])
            if self.calls % self.every == 0:
                st["slow"].lerp_(w, self.pull)
                w.copy_(st["slow"])
        return loss

    def shards(self):
        return {"calls": self.calls, "state": [dict(self.state[p]) for g in self.param_groups for p in g["params"]]}

    def load_shards(self, saved):
        self.calls = saved["calls"]
        params = [p for g in self.param_groups for p in g["params"]]
        for p, st in zip(params, saved["state"]):
            self.state[p] = dict(st)
