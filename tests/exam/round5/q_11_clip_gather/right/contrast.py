import torch
import torch.distributed as dist
import torch.nn.functional as F


class GatherRows(torch.autograd.Function):
    """Concatenate the rows of all ranks; backward sums what the ranks say about my rows."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def local_contrastive(img, txt, scale):
    """My rows against everybody's columns. The mean over the ranks is the loss over the global batch."""
    all_img, all_txt = GatherRows.apply(img), GatherRows.apply(txt)
    mine = torch.arange(len(img)) + dist.get_rank() * len(img)
    i2t = F.cross_entropy(scale * img @ all_txt.t(), mine)
    t2i = F.cross_entropy(scale * txt @ all_img.t(), mine)
    return (i2t + t2i) / 2
