"""Outer Nesterov step of DiLoCo on the shards. Within a site the model is sharded; between sites only the change over a
round is exchanged."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from sites import SITES


class Outer:
    def __init__(self, model, site_group, lr=0.8, momentum=0.5):
        self.params, self.names = list(model.parameters()), [n for n, _ in model.named_parameters()]
        self.group, self.lr, self.momentum = site_group, lr, momentum
        self.base = [p.to_local().detach().clone() for p in self.params]
        self.velocity = [torch.zeros_like(b) for b in self.base]
        self.change = [torch.zeros_like(b) for b in self.base]

    @torch.no_grad()
    def begin_site(self):
        for p, b in zip(self.params, self.base):
            p.to_local().copy_(b)

    @torch.no_grad()
    def end_site(self):
        for c, p, b in zip(self.change, self.params, self.base):
            c.add_(b - p.to_local())

    @torch.no_grad()
    def step(self):
        for p, b, v, c in zip(self.params, self.base, self.velocity, self.change):
            dist.all_reduce(c, group=self.group)
            c.div_(SITES)
            v.mul_(self.momentum).add_(c)
            b.sub_(self.lr * (c + self.momentum * v))
            p.to_local().copy_(b)
            c.zero_()

    def _wrap(self, shards):
        for p, s in zip(self.params, shards):
            yield DTensor.from_local(s, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())

    def full_state(self):
        whole = [t.full_tensor() for t in self._wrap(self.base)], [t.full_tensor() for t in self._wrap(self.velocity)]
        return {"base": dict(zip(self.names, whole[0])), "velocity": dict(zip(self.names, whole[1]))}

    @torch.no_grad()
    def load_full_state(self, state):
        for key, own in (("base", self.base), ("velocity", self.velocity)):
            for n, p, t in zip(self.names, self.params, own):
                t.copy_(distribute_tensor(state[key][n], p.device_mesh, p.placements, src_data_rank=None).to_local())
        self.begin_site()
