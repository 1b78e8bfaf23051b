import torch
import torch.distributed as dist


def concordance(risk, time, event):
    """Harrell's C: share of the comparable pairs in which the earlier event has the higher risk."""
    comparable = (time[:, None] < time[None, :]) & (event[:, None] > 0)
    better = (risk[:, None] > risk[None, :]).float() + 0.5 * (risk[:, None] == risk[None, :]).float()
    return (better * comparable).sum() / comparable.sum()


def gather_rows(t, world):
    out = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(out, t)
    return torch.cat(out)


@torch.no_grad()
def evaluate(model, x, time, event):
    """C-index of the validation set, each rank scores its share of the patients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = len(x) // world
    mine = slice(rank * share, (rank + 1) * share)
    model.eval()
    risk = model(x[mine]).contiguous()
    model.train()
    risk = gather_rows(risk, world)
    return concordance(risk, time[:share * world], event[:share * world]).item()
