import torch
import torch.distributed as dist


def roc_auc(scores, labels):
    pos, neg = scores[labels == 1], scores[labels == 0]
    diff = pos[:, None] - neg[None, :]
    return ((diff > 0).double() + 0.5 * (diff == 0).double()).mean()


@torch.no_grad()
def link_auc(model, graph, pairs, labels):
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    mine = torch.arange(len(pairs)).tensor_split(world)[rank]
    scores = model(graph.adj, graph.x, pairs[mine])
    auc = roc_auc(scores, labels[mine])
    dist.all_reduce(auc)
    auc /= world
    model.train()
    return auc.item()
