import torch
import torch.distributed as dist


@torch.no_grad()
def mean_iou(model, images, masks, n_classes, rank, world):
    """mIoU over the whole validation set, from a confusion matrix summed over the ranks."""
    conf = torch.zeros(n_classes, n_classes, dtype=torch.float64)
    # the same number of forward passes on each rank: every rank takes every batch's own rows
    for xb, yb in zip(images.split(16), masks.split(16)):
        pred = model(xb[rank::world]).argmax(1)
        k = yb[rank::world] * n_classes + pred
        conf += torch.bincount(k.flatten(), minlength=n_classes**2).view(n_classes, n_classes)
    dist.all_reduce(conf)
    inter = conf.diag()
    union = conf.sum(0) + conf.sum(1) - inter
    return (inter / union.clamp(min=1)).mean().item()
