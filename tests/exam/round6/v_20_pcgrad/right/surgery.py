"""PCGrad: gradients of the tasks are projected so that they do not work against each other."""
import torch
import torch.distributed as dist


def local(t):
    return t.to_local() if hasattr(t, "to_local") else t


class GradientSurgery:
    """Collects one (already reduced, sharded) gradient per task and writes the combined one into .grad."""

    def __init__(self, params, seed):
        self.params = list(params)
        self.generator = torch.Generator().manual_seed(seed)
        self.tasks = []

    def collect(self):
        """Takes away the current gradients as those of the next task. A task that does not touch a
        parameter counts as a zero gradient there."""
        self.tasks.append([local(p.grad).clone() if p.grad is not None else torch.zeros_like(local(p)) for p in self.params])
        for p in self.params:
            p.grad = None

    def dots(self):
        flat = torch.stack([torch.cat([g.flatten() for g in task]).double() for task in self.tasks])
        gram = flat @ flat.T  # of this rank's shards
        dist.all_reduce(gram)
        return gram

    def combine(self):
        n = len(self.tasks)
        gram = self.dots()
        # every combined gradient is a linear combination of the original ones, so that the projections
        # can be done on coefficients with the Gram matrix alone
        coef = torch.eye(n, dtype=torch.float64)
        conflicts = 0
        for i in range(n):
            for j in torch.randperm(n, generator=self.generator).tolist():
                if i == j:
                    continue
                dot = coef[i] @ gram[:, j]
                if dot < 0:
                    coef[i, j] -= dot / gram[j, j]
                    conflicts += 1
        weight = coef.sum(0).tolist()
        for k, p in enumerate(self.params):
            p.grad = torch.zeros_like(p)
            for w, task in zip(weight, self.tasks):
                local(p.grad).add_(task[k], alpha=w)
        self.tasks = []
        return conflicts
