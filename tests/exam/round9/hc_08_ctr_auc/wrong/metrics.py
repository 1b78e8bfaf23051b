import torch
import torch.distributed as dist


def roc_auc(scores, labels):
    """Probability that a positive outranks a negative (ties count one half)."""
    pos, neg = scores[labels == 1], scores[labels == 0]
    neg = neg.sort().values
    below = torch.searchsorted(neg, pos).double()
    upto = torch.searchsorted(neg, pos, right=True).double()
    return ((below + upto) / 2).sum() / (len(pos) * len(neg))


def evaluate_auc(scores, labels):
    auc = roc_auc(scores, labels)
    dist.all_reduce(auc)
    return auc.item() / dist.get_world_size()
