import torch
import torch.distributed as dist


def kmeans(points, k, first, rounds=10):
    """Lloyd's algorithm over points that are divided among the ranks; `first` are the starting centres."""
    centres = first.double()
    points = points.double()
    for _ in range(rounds):
        owner = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros(k, points.shape[1] + 1, dtype=torch.float64)
        sums[:, :-1].index_add_(0, owner, points)
        sums[:, -1].index_add_(0, owner, torch.ones(len(points), dtype=torch.float64))
        dist.all_reduce(sums)
        filled = sums[:, -1:] > 0
        centres = torch.where(filled, sums[:, :-1] / sums[:, -1:].clamp(min=1), centres)
    return centres.float()
