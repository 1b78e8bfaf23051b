"""Closed-form ridge regression of the targets on features that are spread over the ranks."""
import torch
import torch.distributed as dist


@torch.no_grad()
def fit(features, targets, lam):
    f = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    gram, cross = f.T @ f, f.T @ targets.double()
    dist.all_reduce(gram)
    dist.all_reduce(cross)
    reg = lam * torch.eye(len(gram), dtype=torch.float64)
    reg[-1, -1] = 0         # the intercept is not shrunk
    w = torch.linalg.solve(gram + reg, cross)
    # one rank's solution counts, so that all ranks write the very same numbers
    dist.broadcast(w, src=0)
    return w[:-1].T.float().contiguous(), w[-1].float().contiguous()
