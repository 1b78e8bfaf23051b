import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather_features(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def clip_loss(img, txt, scale):
    """Rows of this rank against the columns of all ranks."""
    all_img, all_txt = gather_features(img), gather_features(txt)
    labels = torch.arange(len(img)) + dist.get_rank() * len(img)
    logits_i = scale * img @ all_txt.t()
    logits_t = scale * txt @ all_img.t()
    loss = 0.5 * (F.cross_entropy(logits_i, labels) + F.cross_entropy(logits_t, labels))
    acc = (logits_i.argmax(1) == labels).float().mean()
    return loss, acc
