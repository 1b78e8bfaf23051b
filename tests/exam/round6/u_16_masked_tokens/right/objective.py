"""Reconstruction error per hidden patch, over all ranks and all micro-batches of a step."""
import torch
import torch.distributed as dist


def hidden_total(masks):
    n = torch.tensor(float(sum(m.sum().item() for m in masks)))
    dist.all_reduce(n)
    return n.item()


def partial_loss(out, target, mask, total, world):
    """Summed over the steps of accumulation and averaged over ranks this is the mean over all hidden patches."""
    err = (out - target).pow(2).mean(-1)
    return (err * mask).sum() * (world / total)
