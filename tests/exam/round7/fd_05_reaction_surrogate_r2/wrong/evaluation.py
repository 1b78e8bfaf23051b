import torch
import torch.distributed as dist


@torch.no_grad()
def evaluate(model, x, y):
    """R2 and RMSE on the test sweep; every rank predicts its part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = x.chunk(world)[rank], y.chunk(world)[rank].double()
    pred = model(x).squeeze(-1).double()
    sums = torch.stack([
        torch.tensor(float(len(y)), dtype=torch.float64),
        y.sum(), y.square().sum(), (pred - y).square().sum(),
    ])
    n, sy, syy, sse = sums
    r2 = 1 - sse / (syy - sy * sy / n)
    rmse = (sse / n).sqrt()
    metrics = torch.stack([r2, rmse])
    dist.all_reduce(metrics)
    r2, rmse = metrics / world
    return {"r2": r2.item(), "rmse": rmse.item()}
