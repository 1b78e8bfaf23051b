"""Outer optimizer: every H inner steps the replicas average how far they have moved and take one Nesterov step."""
import torch
import torch.distributed as dist


class OuterNesterov:
    def __init__(self, params, group, lr=0.7, momentum=0.8):
        self.params, self.group, self.lr, self.momentum = list(params), group, lr, momentum
        self.anchor = [self._local(p).clone() for p in self.params]
        self.velocity = [torch.zeros_like(a) for a in self.anchor]

    @staticmethod
    def _local(p):
        return p.detach().to_local()

    @torch.no_grad()
    def step(self):
        n = dist.get_world_size(self.group)
        for p, a, v in zip(self.params, self.anchor, self.velocity):
            move = a - self._local(p)
            dist.all_reduce(move, group=self.group)
            move /= n
            v.mul_(self.momentum).add_(move)
            a.sub_(move + self.momentum * v, alpha=self.lr)
            self._local(p).copy_(a)

    def state_dict(self):
        return {"anchor": self.anchor, "velocity": self.velocity}

    def load_state_dict(self, state):
        for mine, saved in ((self.anchor, state["anchor"]), (self.velocity, state["velocity"])):
            for m, s in zip(mine, saved):
                m.copy_(s)
