"""InfoNCE over the global batch: every rank scores its own rows against the features of all ranks."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


class GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


def clip_loss(img, txt, scale):
    all_img = GatherFeatures.apply(img)
    all_txt = GatherFeatures.apply(txt)
    labels = torch.arange(img.shape[0]) + dist.get_rank() * img.shape[0]
    logits_i = scale * img @ all_txt.t()
    logits_t = scale * txt @ all_img.t()
    # mean over the local rows; FSDP averages over the ranks
    return 0.5 * (F.cross_entropy(logits_i, labels) + F.cross_entropy(logits_t, labels))
