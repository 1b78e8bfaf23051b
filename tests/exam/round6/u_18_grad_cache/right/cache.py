"""Contrastive loss over the global batch with cached embedding gradients (two passes over small chunks)."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather(t):
    out = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t.contiguous())
    return torch.cat(out)


def global_loss(u, v, temperature):
    """Every rank computes the same loss of the same gathered embeddings."""
    logits = u @ v.T / temperature
    y = torch.arange(len(u))
    return (F.cross_entropy(logits, y) + F.cross_entropy(logits.T, y)) / 2


def cached_step(towers, chunks, temperature):
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        local = [torch.cat([tower(c[k]) for c in chunks]) for k, tower in enumerate(towers)]
    n = len(local[0])
    leaves = [gather(e).requires_grad_() for e in local]
    loss = global_loss(*leaves, temperature)
    grads = torch.autograd.grad(loss, leaves)
    # the loss is a sum of contributions of the ranks' rows, FSDP averages over ranks: hence the factor
    mine = [world * g[rank * n:(rank + 1) * n] for g in grads]

    for k, tower in enumerate(towers):
        at = 0
        for i, c in enumerate(chunks):
            tower.set_requires_gradient_sync(i + 1 == len(chunks))
            e = tower(c[k])
            e.backward(mine[k][at:at + len(e)])
            at += len(e)
    return loss.item()
