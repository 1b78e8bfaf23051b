import torch
import torch.distributed as dist
import torch.nn.functional as F


@torch.no_grad()
def validate(model, adj, x, y, nodes):
    """Loss and accuracy on the validation nodes of this job."""
    model.eval()
    logits = model(adj, x)[nodes]
    totals = torch.stack([
        F.cross_entropy(logits, y[nodes], reduction="sum"),
        (logits.argmax(1) == y[nodes]).float().sum(),
        torch.tensor(float(len(nodes))),
    ])
    dist.all_reduce(totals)
    model.train()
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()
