"""Contrastive loss over the global batch with the memory of one chunk (gradient caching).

First pass: embeddings of all chunks without a graph, gathered from all ranks. The loss of the whole global batch is
computed on every rank from the gathered embeddings and gives their gradients. Second pass: each chunk once more, with a
graph, against the cached gradients of its rows.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def embed(tower, ids, mask, chunk):
    with torch.no_grad():
        return torch.cat([tower(i, m) for i, m in zip(ids.split(chunk), mask.split(chunk))])


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def symmetric_nce(q, p, log_scale):
    scores = q @ p.T * log_scale.exp()
    gold = torch.arange(len(q))
    return 0.5 * (F.cross_entropy(scores, gold) + F.cross_entropy(scores.T, gold))


def replay(tower, ids, mask, grads, chunk):
    pieces = list(zip(ids.split(chunk), mask.split(chunk), grads.split(chunk)))
    for k, (i, m, g) in enumerate(pieces):
        tower.set_requires_gradient_sync(k == len(pieces) - 1)
        # the towers average over ranks, whereas the cached gradients are those of the global loss
        (tower(i, m) * g).sum().mul(dist.get_world_size()).backward()


def backward(towers, inputs, log_scale, chunk):
    """Fills the gradients of both towers and of the scale; returns the loss of the global batch."""
    rank = dist.get_rank()
    leaves = [gather(embed(t, *x, chunk)).requires_grad_() for t, x in zip(towers, inputs)]
    loss = symmetric_nce(*leaves, log_scale)
    loss.backward()
    for tower, (ids, mask), leaf in zip(towers, inputs, leaves):
        mine = slice(rank * len(ids), (rank + 1) * len(ids))
        replay(tower, ids, mask, leaf.grad[mine], chunk)
    return loss.detach()
