import torch
import torch.distributed as dist


@torch.no_grad()
def kmeans(x, k, iters=8):
    """Lloyd's algorithm over points that are divided over the ranks; float64, the same centroids on all ranks.
    The first centroids: the point farthest from those chosen so far (the first one: farthest from the mean)."""
    x = x.double()
    world = dist.get_world_size()

    def farthest(distance):
        value, i = distance.max(0)
        card = torch.cat([value[None], x[i]])
        cards = [torch.empty_like(card) for _ in range(world)]
        dist.all_gather(cards, card)
        return max(cards, key=lambda c: c[0].item())[1:]

    mean = torch.cat([x.sum(0), torch.tensor([float(len(x))], dtype=torch.float64)])
    dist.all_reduce(mean)
    centroids = farthest((x - mean[:-1] / mean[-1]).pow(2).sum(1))[None]
    while len(centroids) < k:
        centroids = torch.cat([centroids, farthest(torch.cdist(x, centroids).min(1).values)[None]])

    for _ in range(iters):
        owner = torch.cdist(x, centroids).argmin(1)
        sums = torch.zeros(k, x.shape[1] + 1, dtype=torch.float64)
        sums.index_add_(0, owner, torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1))
        dist.all_reduce(sums)
        count = sums[:, -1:]
        centroids = torch.where(count > 0, sums[:, :-1] / count.clamp(min=1), centroids)
    return centroids, torch.cdist(x, centroids).argmin(1)
