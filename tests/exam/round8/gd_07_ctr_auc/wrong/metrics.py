import torch
import torch.distributed as dist


def roc_auc(score, label):
    """Area under the ROC curve through ranks (no ties in the scores expected)."""
    order = score.argsort()
    place = torch.empty_like(score, dtype=torch.float64)
    place[order] = torch.arange(1, len(score) + 1, dtype=torch.float64)
    pos = label.double().sum()
    neg = len(label) - pos
    return ((place * label).sum() - pos * (pos + 1) / 2) / (pos * neg)


def global_auc(score, label):
    auc = roc_auc(score, label)
    dist.all_reduce(auc)
    return auc.item() / dist.get_world_size()
