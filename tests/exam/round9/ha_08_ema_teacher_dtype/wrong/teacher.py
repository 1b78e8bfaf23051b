import torch
from torch.distributed.fsdp import fully_shard

from textnet import TextNet


def build(cfg, seed, dtype=None):
    torch.manual_seed(seed)
    net = TextNet(**cfg)
    if dtype is not None:
        net.to(dtype)
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net, reshard_after_forward=True)


class MeanTeacher:
    """Exponential moving average of the student; it gives the targets and is the model that is kept."""

    def __init__(self, cfg, seed, decay):
        self.net = build(cfg, seed, dtype=torch.bfloat16)
        self.net.requires_grad_(False)
        self.net.eval()
        self.decay = decay

    @torch.no_grad()
    def __call__(self, ids):
        return self.net(ids).float()

    @torch.no_grad()
    def update(self, student):
        for t, s in zip(self.net.parameters(), student.parameters()):
            t.mul_(self.decay).add_(s, alpha=1 - self.decay)
