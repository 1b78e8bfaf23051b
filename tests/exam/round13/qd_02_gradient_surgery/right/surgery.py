"""Projecting conflicting gradients (Yu et al. 2020) on the sharded gradients that FSDP leaves behind."""
import torch
import torch.distributed as dist


def local(t):
    return t.to_local() if hasattr(t, "to_local") else t


class GradientSurgery:
    def __init__(self, params, group=None):
        self.params = list(params)
        self.group = group
        self.conflicts = 0

    def take(self):
        """The trunk gradient of the task just back-propagated, as a list of shards; leaves .grad empty."""
        grads = [local(p.grad).clone() for p in self.params]
        for p in self.params:
            p.grad = None
        return grads

    def _dot(self, a, b):
        value = torch.stack([(x * y).sum() for x, y in zip(a, b)]).sum()
        dist.all_reduce(value, group=self.group)
        return value

    def combine(self, per_task, generator):
        tasks = list(per_task)
        projected = {}
        for t in tasks:
            g = [x.clone() for x in per_task[t]]
            others = [tasks[i] for i in torch.randperm(len(tasks), generator=generator).tolist() if tasks[i] != t]
            for o in others:
                ref = per_task[o]
                dot = self._dot(g, ref)
                if dot < 0:
                    self.conflicts += 1
                    scale = dot / self._dot(ref, ref).clamp_min(1e-12)
                    for x, y in zip(g, ref):
                        x.sub_(y * scale)
            projected[t] = g
        return [torch.stack(xs).sum(0) for xs in zip(*projected.values())]

    def put(self, grads):
        from torch.distributed.tensor import DTensor

        for p, g in zip(self.params, grads):
            p.grad = DTensor.from_local(g, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
