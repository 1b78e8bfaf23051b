import torch
import torch.distributed as dist


@torch.no_grad()
def squared_errors(model, rows):
    x, y = rows
    model.eval()
    errors = (model(x) - y).square()
    model.train()
    return torch.stack([errors.sum(), torch.tensor(float(errors.numel()))])


def over_ranks(sums):
    sums = sums.clone()
    dist.all_reduce(sums)
    return sums
