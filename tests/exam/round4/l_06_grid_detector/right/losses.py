import torch
import torch.distributed as dist
import torch.nn.functional as F


def num_boxes(obj):
    """The normaliser of the box loss."""
    num = obj.sum()
    dist.all_reduce(num)
    num = (num / dist.get_world_size()).clamp(min=1)
    return num


def focal(logit, target, gamma=2.0, alpha=0.4):
    ce = F.binary_cross_entropy_with_logits(logit, target, reduction="none")
    p = torch.sigmoid(logit)
    pt = p * target + (1 - p) * (1 - target)
    at = alpha * target + (1 - alpha) * (1 - target)
    return at * (1 - pt) ** gamma * ce


def detection_loss(logit, pred, obj, box, box_weight=2.0):
    cls = 10 * focal(logit, obj).mean()
    l1 = (F.smooth_l1_loss(pred, box, reduction="none").sum(-1) * obj).sum() / num_boxes(obj)
    return cls + box_weight * l1, cls.detach(), l1.detach()
