"""Contrastive loss over the global batch with chunked encoders (gradient caching)."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather_rows(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def info_nce(q, d, log_scale):
    logits = log_scale.exp() * q @ d.t()
    target = torch.arange(len(q))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def cached_step(model, queries, documents, log_scale, chunk):
    """Puts the gradients of the global loss into the model and into `log_scale`; returns the loss.

    1. encode without a graph, 2. loss and its gradient with respect to all embeddings (the same on all ranks),
    3. encode each chunk again with a graph and push the cached gradient of its embeddings through it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = list(zip(queries.split(chunk), documents.split(chunk)))
    with torch.no_grad():
        encoded = [model(q, d) for q, d in pairs]
    q_all = gather_rows(torch.cat([e[0] for e in encoded])).requires_grad_()
    d_all = gather_rows(torch.cat([e[1] for e in encoded])).requires_grad_()

    loss = info_nce(q_all, d_all, log_scale)
    loss.backward()

    n = len(queries)
    rows = slice(rank * n, (rank + 1) * n)
    q_grads, d_grads = q_all.grad[rows].split(chunk), d_all.grad[rows].split(chunk)
    for i, (q, d) in enumerate(pairs):
        model.set_requires_gradient_sync(i == len(pairs) - 1)
        q_emb, d_emb = model(q, d)
        surrogate = (q_emb * q_grads[i]).sum() + (d_emb * d_grads[i]).sum()
        # the parts of the ranks have to be added up, not averaged
        (surrogate * world).backward()
    return loss.detach()
