import torch
import torch.distributed as dist

from linkgraph import draw_batch


@torch.no_grad()
def hit_rate(model, adj, feats, held, seed=1234, size=256):
    """Share of held-out pairs classified rightly; the same random pairs every time, so that numbers are comparable."""
    torch.manual_seed(seed)
    pairs, label = draw_batch(held, size)
    rank, world = dist.get_rank(), dist.get_world_size()
    out = model(adj, feats, pairs.chunk(world)[rank])
    hits = ((out > 0).float() == label.chunk(world)[rank]).float().sum()
    dist.all_reduce(hits)
    return hits.item() / len(label)
