import torch
import torch.distributed as dist


@torch.no_grad()
def recall_at_1(model, x, y):
    """Share of held-out items whose nearest other item has the same label."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = len(x) // world
    lo = rank * share
    emb, lab = model(x[lo : lo + share]), y[lo : lo + share]
    gallery, gallery_lab = emb, lab
    sim = emb @ gallery.t()
    own = torch.arange(share)
    sim[torch.arange(share), own] = -2.0
    hits = (gallery_lab[sim.argmax(1)] == lab).sum().float()
    stats = torch.stack([hits, torch.tensor(float(share))])
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()
