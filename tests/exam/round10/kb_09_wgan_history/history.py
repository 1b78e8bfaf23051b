import torch
import torch.distributed as dist


class ImageHistory:
    """Pool of older generated images (Shrivastava et al.), the same on all ranks.

    Half of the fakes shown to the critic come from the pool; the fresh ones replace them there.
    """

    def __init__(self, capacity, shape, seed):
        self.images = torch.zeros(capacity, *shape)
        self.filled = 0
        self.gen = torch.Generator().manual_seed(seed)

    def exchange(self, local_fakes):
        world, rank = dist.get_world_size(), dist.get_rank()
        parts = [torch.empty_like(local_fakes) for _ in range(world)]
        dist.all_gather(parts, local_fakes.contiguous())
        fakes = torch.cat(parts)
        n, cap = len(fakes), len(self.images)
        if self.filled < cap:
            take = min(n, cap - self.filled)
            self.images[self.filled:self.filled + take] = fakes[:take]
            self.filled += take
        else:
            swap = torch.randperm(n, generator=self.gen)[: n // 2]
            slots = torch.randperm(cap, generator=self.gen)[: n // 2]
            old = self.images[slots].clone()
            self.images[slots] = fakes[swap]
            fakes[swap] = old
        return fakes.chunk(world)[rank]

    def state_dict(self):
        return {"images": self.images, "filled": self.filled, "gen": self.gen.get_state()}

    def load_state_dict(self, s):
        self.images, self.filled = s["images"], s["filled"]
        self.gen.set_state(s["gen"])
