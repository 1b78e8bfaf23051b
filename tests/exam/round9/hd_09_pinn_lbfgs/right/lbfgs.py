"""Limited-memory BFGS on sharded parameters. Every rank works on the flat vector of its own shards; only scalar
products are summed over the ranks."""
import torch
import torch.distributed as dist


class ShardedLBFGS:
    def __init__(self, params, lr=1.0, history=6, armijo=1e-4, max_halvings=12):
        self.params = list(params)
        self.lr, self.history, self.armijo, self.max_halvings = lr, history, armijo, max_halvings
        self.s, self.y = [], []
        self.previous = None          # (flat parameters, flat gradient) of the last accepted point

    def dot(self, a, b):
        value = torch.dot(a, b)
        dist.all_reduce(value)
        return value

    def flat(self, gradient=False):
        return torch.cat([(p.grad if gradient else p.detach()).to_local().reshape(-1) for p in self.params])

    @torch.no_grad()
    def assign(self, flat):
        offset = 0
        for p in self.params:
            local = p.to_local()
            local.copy_(flat[offset:offset + local.numel()].view_as(local))
            offset += local.numel()

    def direction(self, g):
        q = g.clone()
        alphas = []
        for s, y in zip(reversed(self.s), reversed(self.y)):
            a = self.dot(s, q) / self.dot(y, s)
            alphas.append(a)
            q -= a * y
        if self.s:
            q *= self.dot(self.s[-1], self.y[-1]) / self.dot(self.y[-1], self.y[-1])
        else:
            q *= (1 / self.dot(g, g).sqrt()).clamp(max=1.0) * 0.1
        for (s, y), a in zip(zip(self.s, self.y), reversed(alphas)):
            q += s * (a - self.dot(y, q) / self.dot(y, s))
        return -q

    def step(self, closure):
        """closure(backward) returns the loss averaged over all ranks."""
        loss = closure(backward=True)
        x, g = self.flat(), self.flat(gradient=True)
        if self.previous is not None:
            s, y = x - self.previous[0], g - self.previous[1]
            if self.dot(s, y) > 1e-10:
                self.s, self.y = (self.s + [s])[-self.history:], (self.y + [y])[-self.history:]
        d = self.direction(g)
        slope = self.dot(g, d)
        t = self.lr
        for _ in range(self.max_halvings):
            self.assign(x + t * d)
            if closure(backward=False) <= loss + self.armijo * t * slope:
                break
            t /= 2
        self.previous = (x, g)
        return loss

    def state_dict(self):
        return {"s": self.s, "y": self.y, "previous": self.previous}

    def load_state_dict(self, state):
        self.s, self.y, self.previous = state["s"], state["y"], state["previous"]
