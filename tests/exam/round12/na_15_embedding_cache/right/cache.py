"""Large-batch contrastive training in chunks (the embedding-gradient cache).

1. embed everything chunk by chunk without a graph,
2. gradient of the loss of the whole batch with respect to the embeddings,
3. embed again with a graph and push the cached gradients through."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def all_rows(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def batch_loss(q, d, temperature):
    scores = q @ d.T / temperature
    gold = torch.arange(len(q))
    return 0.5 * (F.cross_entropy(scores, gold) + F.cross_entropy(scores.T, gold))


class CachedContrast:
    def __init__(self, model, chunk, temperature=0.1):
        self.model, self.chunk, self.temperature = model, chunk, temperature

    def chunks(self, query, doc):
        """(ids, side) of both sides of `chunk` pairs at a time."""
        for q, d in zip(query.split(self.chunk), doc.split(self.chunk)):
            yield torch.cat([q, d]), torch.arange(2).repeat_interleave(len(q))

    def backward(self, query, doc):
        rank, world, n = dist.get_rank(), dist.get_world_size(), len(query)
        pieces = list(self.chunks(query, doc))
        with torch.no_grad():
            emb = [self.model(*piece).chunk(2) for piece in pieces]
        q = all_rows(torch.cat([e[0] for e in emb])).requires_grad_()
        d = all_rows(torch.cat([e[1] for e in emb])).requires_grad_()
        loss = batch_loss(q, d, self.temperature)
        gq, gd = torch.autograd.grad(loss, (q, d))
        mine = slice(rank * n, (rank + 1) * n)
        cached = zip(gq[mine].split(self.chunk), gd[mine].split(self.chunk))
        for i, (piece, grads) in enumerate(zip(pieces, cached)):
            self.model.set_requires_gradient_sync(i + 1 == len(pieces))
            # loss is that of the whole batch: undo the mean over ranks
            self.model(*piece).backward(torch.cat(grads) * world)
        return loss.detach()
