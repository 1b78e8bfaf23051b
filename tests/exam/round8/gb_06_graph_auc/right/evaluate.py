import torch
import torch.distributed as dist


def roc_auc(scores, labels):
    pos, neg = scores[labels == 1], scores[labels == 0]
    diff = pos[:, None] - neg[None, :]
    return ((diff > 0).double() + 0.5 * (diff == 0).double()).mean()


def gather(t):
    """Concatenate tensors of different lengths from all ranks."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, t)
    return torch.cat(parts)


@torch.no_grad()
def link_auc(model, graph, pairs, labels):
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    mine = torch.arange(len(pairs)).tensor_split(world)[rank]
    scores = model(graph.adj, graph.x, pairs[mine])
    auc = roc_auc(gather(scores), gather(labels[mine]))
    model.train()
    return auc.item()
