import torch


class DriftingStream:
    """A classification stream whose class prototypes rotate from task to task."""

    def __init__(self, dim, classes, steps_per_task, seed):
        self.dim, self.classes, self.spt, self.seed = dim, classes, steps_per_task, seed
        self.proto = torch.randn(classes, dim, generator=torch.Generator().manual_seed(seed)) * 1.2

    def task_of(self, step):
        return step // self.spt

    def batch(self, step, size):
        g = torch.Generator().manual_seed(self.seed + 31 * step + 1)
        y = torch.randint(0, self.classes, (size,), generator=g)
        shift = torch.roll(self.proto, self.task_of(step), dims=1)
        return shift[y] + torch.randn(size, self.dim, generator=g), y
