import torch

from modules import StreamNorm


class WeightAverage:
    """Equal average of snapshots, held in a second sharded model of the same layout."""

    def __init__(self, shadow):
        self.shadow, self.count = shadow, 0
        for p in shadow.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def absorb(self, model):
        self.count += 1
        for a, p in zip(self.shadow.parameters(), model.parameters()):
            a.to_local().lerp_(p.to_local(), 1.0 / self.count)

    @torch.no_grad()
    def recalibrate(self, batches):
        """Exact statistics of the averaged weights, layer after layer: a later layer sees calibrated inputs."""
        norms = [m for m in self.shadow.modules() if isinstance(m, StreamNorm)]
        self.shadow.train()
        for m in norms:
            m.track, m.momentum = False, None
        for m in norms:
            m.mean.zero_()
            m.var.fill_(1.0)
            m.batches.zero_()
            m.track = True
            for x in batches:
                self.shadow(x)
            m.track = False
        self.shadow.eval()
