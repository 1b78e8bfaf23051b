"""Selective backpropagation: of a large pool of candidates only the hardest are trained on."""
import torch
import torch.distributed as dist


def gather_in_order(local):
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts)


class HardestOfPool:
    def __init__(self, keep, skip_top=0.0):
        self.keep, self.skip_top = keep, skip_top
        self.history = torch.zeros(0)

    @torch.no_grad()
    def pick(self, score_fn, pool, rank, world):
        """Every rank scores its part of the pool; all ranks then make the same choice and each takes an
        equal part of it. The very highest scores are left out as probable label noise."""
        n = len(pool[0]) // world
        part = [t[rank * n : (rank + 1) * n] for t in pool]
        scores = gather_in_order(score_fn(*part))
        order = scores.argsort(descending=True, stable=True)
        noisy = int(self.skip_top * len(order))
        chosen = order[noisy : noisy + self.keep].sort().values
        self.history = torch.cat([self.history, scores.mean()[None]])[-8:]
        m = self.keep // world
        mine = chosen[rank * m : (rank + 1) * m]
        return [t[mine] for t in pool]
