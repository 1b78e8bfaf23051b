"""Contrastive loss over the whole global batch with the memory of one small chunk (Gao et al. 2021, GradCache).

First all chunks are embedded without a graph, the embeddings of all ranks are gathered and the gradient of the loss with
respect to them is taken; then each chunk is embedded again and this gradient is sent back through the encoder.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather_rows(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def clip_loss(a, b, log_scale):
    logits = a @ b.T * log_scale.exp()
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def cached_backward(encoders, inputs, log_scale, chunk):
    """Leaves the gradients in the encoders and in log_scale; returns the loss of the global batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    leaves = []
    with torch.no_grad():
        for enc, x in zip(encoders, inputs):
            leaves.append(gather_rows(torch.cat([enc(c) for c in x.split(chunk)])).requires_grad_())
    # log_scale is a replicated scalar: every rank takes the gradient of the same global loss
    loss = clip_loss(*leaves, log_scale)
    loss.backward()
    for enc, x, leaf in zip(encoders, inputs, leaves):
        grads = leaf.grad.chunk(world)[rank].split(chunk)
        pieces = x.split(chunk)
        for k, (c, g) in enumerate(zip(pieces, grads)):
            enc.set_requires_gradient_sync(k == len(pieces) - 1)
            # the sharded gradients are averaged over the ranks, but the parts of the ranks have to be added up
            (enc(c) * g).sum().mul(world).backward()
    return loss.detach()
