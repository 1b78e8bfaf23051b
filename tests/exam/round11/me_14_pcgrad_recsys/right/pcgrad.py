"""Projecting conflicting gradients (Yu et al., 2020) over sharded gradients."""
import torch
import torch.distributed as dist


class PCGrad:
    def __init__(self, params, gen):
        self.params, self.gen = list(params), gen
        self.conflicts = 0

    def take(self):
        """Moves the gradients out of the parameters into a list of local shards."""
        grads = []
        for p in self.params:
            grads.append(torch.zeros_like(p.to_local()) if p.grad is None else p.grad.to_local().clone())
            p.grad = None
        return grads

    @staticmethod
    def dot(a, b):
        s = torch.stack([(x * y).sum() for x, y in zip(a, b)]).sum()
        dist.all_reduce(s)
        return s

    def merge(self, per_task):
        """Projects each task's gradient and writes the sum to .grad."""
        projected = []
        for t, grads in enumerate(per_task):
            current = [g.clone() for g in grads]
            others = [o for o in torch.randperm(len(per_task), generator=self.gen).tolist() if o != t]
            for o in others:
                inner = self.dot(current, per_task[o])
                if inner < 0:
                    self.conflicts += 1
                    factor = inner / self.dot(per_task[o], per_task[o]).clamp(min=1e-20)
                    for c, g in zip(current, per_task[o]):
                        c.sub_(factor * g)
            projected.append(current)
        for k, p in enumerate(self.params):
            total = torch.stack([grads[k] for grads in projected]).sum(0)
            p.grad = torch.zeros_like(p)
            p.grad.to_local().copy_(total)
