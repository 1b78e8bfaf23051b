"""Schedule-free AdamW. While training the parameters hold y = (1 - beta) z + beta x, for evaluation x."""
import torch


class ScheduleFreeAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=5e-3, beta=0.9, beta2=0.99, eps=1e-5, wd=0.01, warmup=4):
        super().__init__(params, dict(lr=lr, beta=beta, beta2=beta2, eps=eps, wd=wd, warmup=warmup, t=0, weight=0.0, mode="train"))

    @torch.no_grad()
    def _to(self, mode):
        for g in self.param_groups:
            if g["mode"] != mode:
                for p in g["params"]:
                    st = self.state[p]
                    if st:
                        if mode == "eval":
                            st["y"] = p.clone()
                            p.copy_(st["x"])
                        else:
                            p.copy_(st.pop("y"))
                g["mode"] = mode

    def train(self):
        self._to("train")

    def eval(self):
        self._to("eval")

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            if g["mode"] != "train":
                raise RuntimeError("call train() before step()")
            g["t"] += 1
            lr = g["lr"] * min(1.0, g["t"] / g["warmup"])
            g["weight"] += lr**2
            c = lr**2 / g["weight"]
            for p in g["params"]:
                st = self.state[p]
                if not st:
                    st["z"], st["x"], st["v"] = p.clone(), p.clone(), torch.zeros_like(p)
                st["v"].mul_(g["beta2"]).addcmul_(p.grad, p.grad, value=1 - g["beta2"])
                d = p.grad / ((st["v"] / (1 - g["beta2"] ** g["t"])).sqrt() + g["eps"])
                st["z"].add_(d + g["wd"] * p, alpha=-lr)
                st["x"].lerp_(st["z"], c)
                p.copy_(st["z"].lerp(st["x"], g["beta"]))
