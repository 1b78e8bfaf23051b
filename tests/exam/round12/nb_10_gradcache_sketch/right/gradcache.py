"""Large-batch contrastive learning in bounded memory (Gao et al., 2021).

1. embed every chunk without a graph, 2. evaluate the loss on the embeddings of all ranks and differentiate it with
respect to the embeddings only, 3. run every chunk again with a graph and feed it the cached embedding gradients.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather_rows(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def embed(tower, chunks):
    with torch.no_grad():
        return torch.cat([tower(c) for c in chunks])


def symmetric_nce(za, zb, log_scale):
    logits = log_scale.exp() * za @ zb.T
    target = torch.arange(len(za))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


def replay(tower, chunks, cached):
    for i, (chunk, grad) in enumerate(zip(chunks, cached.split([len(c) for c in chunks]))):
        tower.set_requires_gradient_sync(i == len(chunks) - 1)
        tower(chunk).backward(grad)


def contrastive_backward(photo, sketch, log_scale, photos, sketches, chunk):
    pc, sc = photos.split(chunk), sketches.split(chunk)
    za = gather_rows(embed(photo, pc)).requires_grad_()
    zb = gather_rows(embed(sketch, sc)).requires_grad_()
    loss = symmetric_nce(za, zb, log_scale)
    loss.backward()
    rank, world, n = dist.get_rank(), dist.get_world_size(), len(photos)
    mine = slice(rank * n, (rank + 1) * n)
    # every rank holds the whole loss; the reduction averages over ranks
    replay(photo, pc, za.grad[mine] * world)
    replay(sketch, sc, zb.grad[mine] * world)
    return loss.detach()
