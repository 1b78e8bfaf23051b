"""Gradient surgery for several losses of one sharded trunk (PCGrad, Yu et al. 2020)."""
import torch
import torch.distributed as dist


def gram_matrix(grads):
    """Inner products of the task gradients over all shards of all ranks."""
    k = len(grads)
    gram = torch.zeros(k, k, dtype=torch.float64)
    for i in range(k):
        for j in range(i, k):
            gram[i, j] = gram[j, i] = sum((a.double() * b.double()).sum() for a, b in zip(grads[i], grads[j]))
    dist.all_reduce(gram)
    return gram


def combine(gram, order):
    """Coefficients c such that sum_j c[i, j] g_j is task i's gradient after projection; only the Gram matrix is needed."""
    k = len(gram)
    coef = torch.eye(k, dtype=torch.float64)
    conflicts = 0
    for i in range(k):
        for j in order[i]:
            if i == j:
                continue
            inner = (coef[i] @ gram[:, j]).item()
            if inner < 0:
                coef[i, j] -= inner / gram[j, j].item()
                conflicts += 1
    return coef.sum(0) / k, conflicts


class PCGrad:
    def __init__(self, shared, seed):
        self.shared = list(shared)
        self.gen = torch.Generator().manual_seed(seed)  # the same on all ranks, so that they project alike

    def take(self):
        """Take the shards of the present gradient out of the trunk."""
        out = [p.grad.to_local().clone() for p in self.shared]
        for p in self.shared:
            p.grad = None
        return out

    @torch.no_grad()
    def put(self, grads, template):
        k = len(grads)
        order = [torch.randperm(k, generator=self.gen).tolist() for _ in range(k)]
        weights, conflicts = combine(gram_matrix(grads), order)
        for n, p in enumerate(self.shared):
            p.grad = template(p, sum(w * g[n] for w, g in zip(weights.tolist(), grads)))
        return conflicts
