import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Tower(nn.Module):
    def __init__(self, d_in, width, d_out):
        super().__init__()
        self.inp = nn.Linear(d_in, width)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, d_out, bias=False)

    def forward(self, x):
        x = F.gelu(self.inp(x))
        for layer in self.hidden:
            x = x + F.gelu(layer(x))
        return F.normalize(self.out(self.norm(x)), dim=-1)


class TwoTower(nn.Module):
    """CLIP-like model with a learned temperature."""

    def __init__(self, d_image=24, d_text=16, width=48, d_out=32):
        super().__init__()
        self.image = Tower(d_image, width, d_out)
        self.text = Tower(d_text, width, d_out)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image, text):
        return self.image(image), self.text(text), self.logit_scale.exp()


class GatherRows(torch.autograd.Function):
    """all_gather along dim 0; the backward sums what every rank wants of our rows."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        first = dist.get_rank() * ctx.rows
        return grad[first:first + ctx.rows]


def clip_loss(img, txt, scale):
    """Rows of this rank against the columns of all ranks, both ways."""
    all_img, all_txt = GatherRows.apply(img), GatherRows.apply(txt)
    target = dist.get_rank() * img.shape[0] + torch.arange(img.shape[0])
    i2t = F.cross_entropy(scale * img @ all_txt.T, target)
    t2i = F.cross_entropy(scale * txt @ all_img.T, target)
    return 0.5 * (i2t + t2i)
