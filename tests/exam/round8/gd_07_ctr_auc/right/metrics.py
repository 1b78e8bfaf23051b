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


def gather_rows(x):
    """Rows of all ranks, which may hold different numbers of them."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return torch.cat(parts)


def global_auc(score, label):
    return roc_auc(gather_rows(score), gather_rows(label)).item()
