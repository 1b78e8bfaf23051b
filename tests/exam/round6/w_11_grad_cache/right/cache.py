"""Contrastive loss over a batch that is too big for one graph (the "gradient cache")."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def global_loss(q, d, tau):
    target = torch.arange(len(q))
    logits = q @ d.T / tau
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


def cached_backward(towers, inputs, chunk, tau):
    # 1. embeddings of all chunks without graphs
    with torch.no_grad():
        emb = [torch.cat([t(c) for c in x.split(chunk)]) for t, x in zip(towers, inputs)]
    # 2. the loss of the whole batch and its gradient by the embeddings, the same on every rank
    full = [gather(e).requires_grad_() for e in emb]
    loss = global_loss(*full, tau)
    grads = torch.autograd.grad(loss, full)
    # 3. chunks again with graphs; FSDP divides by the world size, and the ranks' parts are to be summed
    rank, world = dist.get_rank(), dist.get_world_size()
    for tower, x, g in zip(towers, inputs, grads):
        g = g.chunk(world)[rank] * world
        xs, gs = x.split(chunk), g.split(chunk)
        for i, (xc, gc) in enumerate(zip(xs, gs)):
            tower.set_requires_gradient_sync(i == len(xs) - 1)
            (tower(xc) * gc).sum().backward()
    return loss.detach()
