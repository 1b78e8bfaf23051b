import torch.distributed as dist


def masked_multitask_mse(pred, target, measured):
    """Squared error per assay, averaged over the measured labels of the batch, then over assays."""
    mask = measured.float()
    count = mask.sum(0)
    dist.all_reduce(count, op=dist.ReduceOp.SUM)
    count = count / dist.get_world_size()
    per_task = ((pred - target).square() * mask).sum(0) / count.clamp(min=1e-6)
    return per_task.mean()
