import torch
import torch.distributed as dist
import torch.nn.functional as F


@torch.no_grad()
def evaluate(model, holdout, batch=32):
    """Log loss and accuracy over the whole holdout set; every rank scores its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cats, dense, labels = (t[rank::world] for t in holdout)
    totals = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for i in range(0, len(labels), batch):
        logits = model(cats[i : i + batch], dense[i : i + batch])
        y = labels[i : i + batch]
        totals[0] += F.cross_entropy(logits, y, reduction="sum").double()
        totals[1] += (logits.argmax(-1) == y).sum()
        totals[2] += len(y)
    model.train()
    model.reshard()
    dist.all_reduce(totals)
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()
