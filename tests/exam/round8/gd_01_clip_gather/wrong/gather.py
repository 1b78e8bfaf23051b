"""Feature exchange between ranks for the contrastive loss."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def all_gather_features(x):
    """Concatenate the features of all ranks along the batch dimension."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def clip_loss(image, text, scale):
    """Local rows against the columns of the global batch, both directions."""
    all_image = all_gather_features(image)
    all_text = all_gather_features(text)
    rows = image.shape[0]
    target = torch.arange(rows) + dist.get_rank() * rows
    i2t = scale * image @ all_text.T
    t2i = scale * text @ all_image.T
    return 0.5 * (F.cross_entropy(i2t, target) + F.cross_entropy(t2i, target))
