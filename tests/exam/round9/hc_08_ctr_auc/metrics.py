import torch
import torch.distributed as dist


def roc_auc(scores, labels):
    """Probability that a positive outranks a negative (ties count one half)."""
    pos, neg = scores[labels == 1], scores[labels == 0]
    neg = neg.sort().values
    below = torch.searchsorted(neg, pos).double()
    upto = torch.searchsorted(neg, pos, right=True).double()
    return ((below + upto) / 2).sum() / (len(pos) * len(neg))


def gather_rows(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t)
    return torch.cat(parts)


def evaluate_auc(scores, labels):
    return roc_auc(gather_rows(scores), gather_rows(labels)).item()
