"""Feature exchange between ranks for the contrastive loss."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


class AllGatherFeatures(torch.autograd.Function):
    """Concatenate the features of all ranks along the batch dimension."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


def clip_loss(image, text, scale):
    """Local rows against the columns of the global batch, both directions."""
    all_image = AllGatherFeatures.apply(image)
    all_text = AllGatherFeatures.apply(text)
    rows = image.shape[0]
    target = torch.arange(rows) + dist.get_rank() * rows
    i2t = scale * image @ all_text.T
    t2i = scale * text @ all_image.T
    return 0.5 * (F.cross_entropy(i2t, target) + F.cross_entropy(t2i, target))
