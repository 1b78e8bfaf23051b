"""PCGrad: Gradient Surgery for Multi-Task Learning (Yu et al., 2020) on sharded gradients."""
import torch


def take_grads(params):
    grads = []
    for p in params:
        grads.append(torch.zeros_like(p) if p.grad is None else p.grad.detach().clone())
        p.grad = None
    return grads


def dot(a, b):
    return sum((x.to_local() * y.to_local()).sum() for x, y in zip(a, b))


@torch.no_grad()
def pcgrad(task_grads, generator):
    """Projects every task's gradient off the gradients it conflicts with, then sums them."""
    merged = None
    conflicts = 0
    for i, own in enumerate(task_grads):
        g = [t.clone() for t in own]
        for j in torch.randperm(len(task_grads), generator=generator).tolist():
            if j == i:
                continue
            other = task_grads[j]
            d = dot(g, other)
            if d < 0:
                conflicts += 1
                scale = (d / dot(other, other).clamp(min=1e-12)).item()
                for x, y in zip(g, other):
                    x.sub_(y, alpha=scale)
        merged = g if merged is None else [m + x for m, x in zip(merged, g)]
    return merged, conflicts
