"""Contrastive loss over the global batch with chunked encoders (GradCache, Gao et al. 2021).

1. embed all chunks without a graph, 2. gather the embeddings of all ranks and take the gradient of the loss with
respect to them, 3. run each chunk again with a graph and push the cached gradient through.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather_rows(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def symmetric_info_nce(a, b, log_scale):
    logits = log_scale.exp() * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t()
    target = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


class GradCache:
    def __init__(self, encoders, temperature, chunks):
        self.encoders, self.temperature, self.chunks = encoders, temperature, chunks

    def __call__(self, inputs):
        """Accumulates gradients in the encoders; returns the global loss (the same on every rank)."""
        rank, world = dist.get_rank(), dist.get_world_size()
        cached = []
        with torch.no_grad():
            for enc, x in zip(self.encoders, inputs):
                cached.append(gather_rows(torch.cat([enc(c) for c in x.chunk(self.chunks)])))

        leaves = [c.requires_grad_() for c in cached]
        scale = self.temperature.detach().clone().requires_grad_()
        loss = symmetric_info_nce(*leaves, scale)
        *grads, scale_grad = torch.autograd.grad(loss, [*leaves, scale])
        self.temperature.grad = scale_grad

        for enc, x, g in zip(self.encoders, inputs, grads):
            # fully_shard averages over ranks, the parts of the gradient have to be added
            own = g.chunk(world)[rank] * world
            pieces = list(zip(x.chunk(self.chunks), own.chunk(self.chunks)))
            for i, (c, gc) in enumerate(pieces):
                enc.set_requires_gradient_sync(i == len(pieces) - 1)
                enc(c).backward(gc)
        return loss.item()
