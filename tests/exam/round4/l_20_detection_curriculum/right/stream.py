"""A stream of training images whose difficulty follows the model: the pace is part of the training state."""
import torch


class Pace:
    """Difficulty in 0..1, raised while the smoothed loss is below a target. The same on all ranks by construction."""

    def __init__(self, target=0.45, gain=0.08):
        self.target, self.gain = target, gain
        self.level, self.smooth = 0.0, None

    def report(self, global_loss):
        self.smooth = global_loss if self.smooth is None else 0.7 * self.smooth + 0.3 * global_loss
        if self.smooth < self.target:
            self.level = min(1.0, self.level + self.gain)

    def state_dict(self):
        return {"level": self.level, "smooth": -1.0 if self.smooth is None else self.smooth}

    def load_state_dict(self, sd):
        self.level = sd["level"]
        self.smooth = None if sd["smooth"] < 0 else sd["smooth"]


def endless(start, batch, rank, world, pace, size=12):
    """Yields (step, images, centres); reads the pace at the moment at which a batch is made."""
    step = start
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    while True:
        g = torch.Generator().manual_seed(9000 + step)
        c = 1.5 + (size - 3) * torch.rand(batch, 2, generator=g)
        noise = torch.randn(batch, size, size, generator=g)
        fake = 1.5 + (size - 3) * torch.rand(batch, 2, generator=g)
        spot = lambda p: torch.exp(-((yy - p[:, 0, None, None]) ** 2 + (xx - p[:, 1, None, None]) ** 2) / 2)
        img = 2 * spot(c) + pace.level * (0.8 * spot(fake) + 0.5 * noise)
        mine = slice(rank, None, world)
        yield step, img[mine].unsqueeze(1), (c / (size - 1))[mine]
        step += 1
