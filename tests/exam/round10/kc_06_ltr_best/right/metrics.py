import torch
import torch.distributed as dist


def ndcg(scores, labels, k=5):
    gain = 2.0**labels - 1
    discount = 1.0 / torch.log2(torch.arange(2, k + 2).float())
    order = scores.topk(k, dim=1).indices
    dcg = (gain.gather(1, order) * discount).sum(1)
    ideal = (gain.topk(k, dim=1).values * discount).sum(1)
    return dcg / ideal.clamp(min=1e-6)


@torch.no_grad()
def evaluate(model, x, y):
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    values = ndcg(model(x[rank::world]), y[rank::world]).double()
    model.train()
    total = torch.stack([values.sum(), torch.tensor(float(len(values)), dtype=torch.float64)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
