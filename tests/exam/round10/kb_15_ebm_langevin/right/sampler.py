import torch
import torch.distributed as dist


class PersistentChains:
    """Langevin chains that live through the training; the pool is equal on all ranks.

    A step picks chains, every rank moves its share of them downhill in energy and the moved ones are put back
    everywhere. Some chains are restarted from noise.
    """

    def __init__(self, model, size, shape, batch, seed, steps=4, step_size=0.2, noise=0.02, restart=0.1):
        self.model, self.batch = model, batch
        self.steps, self.step_size, self.noise, self.restart = steps, step_size, noise, restart
        self.gen = torch.Generator().manual_seed(seed)
        self.pool = torch.rand(size, *shape, generator=self.gen) * 2 - 1

    def sample(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        picked = torch.randperm(len(self.pool), generator=self.gen)[: self.batch]
        x = self.pool[picked]
        fresh = torch.rand(self.batch, generator=self.gen) < self.restart
        x = torch.where(fresh[:, None, None, None], torch.rand(x.shape, generator=self.gen) * 2 - 1, x)
        noise = self.noise * torch.randn(self.steps, *x.shape, generator=self.gen)
        x, noise = x.chunk(world)[rank], noise.chunk(world, dim=1)[rank]
        for k in range(self.steps):
            x = x.detach().requires_grad_(True)
            self.model(x).sum().backward()
            x = (x.detach() - self.step_size * x.grad.clamp(-0.1, 0.1) + noise[k]).clamp(-1, 1)
        # the backward passes above have also left gradients at the weights
        self.model.zero_grad(set_to_none=True)
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        self.pool[picked] = torch.cat(parts)
        return x
