"""Contrastive step over a batch that does not fit: embed without a graph, differentiate the loss with respect to the
embeddings of all ranks, then run the towers again chunk by chunk and push these gradients through."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def info_nce(q, a, temperature):
    scores = q @ a.T / temperature
    target = torch.arange(len(q))
    return 0.5 * (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target))


class CachedContrast:
    def __init__(self, towers, chunk, temperature=0.1):
        self.towers, self.chunk, self.temperature = towers, chunk, temperature
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def _embed(self, tower, ids):
        with torch.no_grad():
            return torch.cat([tower(part) for part in ids.split(self.chunk)])

    def _push(self, tower, ids, grad):
        parts, grads = ids.split(self.chunk), grad.split(self.chunk)
        for i, (part, g) in enumerate(zip(parts, grads)):
            tower.set_requires_gradient_sync(i + 1 == len(parts))
            # gradients are averaged over the ranks, the loss is one for all of them
            tower(part).backward(g * self.world)

    def backward(self, *inputs):
        local = [self._embed(t, ids) for t, ids in zip(self.towers, inputs)]
        whole = [gather(x).requires_grad_() for x in local]
        loss = info_nce(*whole, self.temperature)
        grads = torch.autograd.grad(loss, whole)
        for tower, ids, grad in zip(self.towers, inputs, grads):
            mine = grad[self.rank * len(ids) : (self.rank + 1) * len(ids)]
            self._push(tower, ids, mine)
        return loss.detach()
