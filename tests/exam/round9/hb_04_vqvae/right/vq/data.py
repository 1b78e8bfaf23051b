import torch


class Stripes:
    """Oriented gratings, sorted by angle as the files on disk would be sorted by class."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        ang = torch.rand(n, generator=g).sort().values * 3.14159
        freq = torch.rand(n, generator=g) * 0.8 + 0.5
        yy, xx = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        d = xx * ang.cos().view(-1, 1, 1) + yy * ang.sin().view(-1, 1, 1)
        self.x = torch.sin(d * freq.view(-1, 1, 1)).unsqueeze(1)

    def epoch(self, batch, epoch, rank, world):
        """Each global batch goes to the ranks in contiguous parts."""
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(1000 + epoch))
        for i in range(0, len(order), batch):
            yield self.x[order[i : i + batch].sort().values.chunk(world)[rank]]
