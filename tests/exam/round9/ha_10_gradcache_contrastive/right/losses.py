import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def global_info_nce(queries, docs, temperature):
    """In-batch softmax over the whole global batch."""
    q, d = F.normalize(queries, dim=-1), F.normalize(docs, dim=-1)
    return F.cross_entropy(q @ d.T / temperature, torch.arange(len(q)))


def embedding_gradients(queries, docs, temperature):
    """Gradients of the global loss at this rank's embeddings. Every rank computes the same global loss from
    the gathered embeddings (it is small) and keeps its own rows."""
    n, rank = len(queries), dist.get_rank()
    with torch.enable_grad():
        q = gather(queries).requires_grad_()
        d = gather(docs).requires_grad_()
        loss = global_info_nce(q, d, temperature)
        dq, dd = torch.autograd.grad(loss, (q, d))
    own = slice(rank * n, (rank + 1) * n)
    return loss.detach(), dq[own], dd[own]
