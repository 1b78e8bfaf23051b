"""Contrastive loss over the whole batch with cached gradients.

First pass: embeddings of all micro-batches, no graph. The loss of the whole batch (all ranks) gives the gradient by
each embedding. Second pass: every micro-batch once more with graph, driven by the cached gradients.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def all_rows(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def symmetric_loss(user, item, temperature):
    score = user @ item.t() / temperature
    target = torch.arange(len(score))
    return 0.5 * (F.cross_entropy(score, target) + F.cross_entropy(score.t(), target))


class CachedStep:
    def __init__(self, user_tower, item_tower, micro, temperature=0.2):
        self.towers = (user_tower, item_tower)
        self.micro, self.temperature = micro, temperature

    def __call__(self, user, item):
        world, rank = dist.get_world_size(), dist.get_rank()
        chunks = [t.split(self.micro) for t in (user, item)]
        with torch.no_grad():
            own = [torch.cat([tower(c) for c in cs]) for tower, cs in zip(self.towers, chunks)]
        leaves = [all_rows(e).requires_grad_(True) for e in own]
        loss = symmetric_loss(*leaves, self.temperature)
        grads = torch.autograd.grad(loss, leaves)
        mine = slice(rank * len(user), (rank + 1) * len(user))
        for tower, cs, grad in zip(self.towers, chunks, grads):
            pieces = (world * grad[mine]).split(self.micro)
            for i, (c, g) in enumerate(zip(cs, pieces)):
                tower.set_requires_gradient_sync(i == len(cs) - 1)
                tower(c).backward(g)
        return loss.detach()
