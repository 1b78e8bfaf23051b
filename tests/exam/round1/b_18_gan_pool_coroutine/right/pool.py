import torch
import torch.distributed as dist


class FakePool:
    """History of generated samples; the same on all ranks because the fakes are gathered in rank order."""

    def __init__(self, size, dim):
        self.data = torch.zeros(size, dim)
        self.filled = torch.zeros(1, dtype=torch.long)

    @torch.no_grad()
    def exchange(self, fake, g):
        """Half of the answer are new fakes, half are old ones (drawn with the shared generator g)."""
        world, rank = dist.get_world_size(), dist.get_rank()
        everything = fake.new_empty(len(fake) * world, fake.shape[1])
        dist.all_gather_into_tensor(everything, fake.contiguous())
        n, filled = len(everything), int(self.filled)
        old = torch.rand(n, generator=g) < 0.5
        pick = torch.randint(0, max(filled, 1), (n,), generator=g)
        answer = torch.where((old & (filled > 0))[:, None], self.data[pick], everything)
        slots = (
            torch.randperm(len(self.data), generator=g)[:n]
            if filled >= len(self.data)
            else torch.arange(filled, min(filled + n, len(self.data)))
        )
        self.data[slots] = everything[: len(slots)]
        self.filled.fill_(min(filled + n, len(self.data)))
        return answer.chunk(world)[rank]
