import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Residual(nn.Module):
    """Starts as the identity (the last layer is zero), so growing doesn't change the function."""

    def __init__(self, width, seed):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.up.weight.normal_(0, width ** -0.5, generator=g)
            self.up.bias.zero_()
            self.down.weight.zero_()
            self.down.bias.zero_()

    def forward(self, h):
        return h + self.down(torch.relu(self.up(self.norm(h))))


class GrowingNet(nn.Module):
    def __init__(self, d_in=30, width=32, d_out=5):
        super().__init__()
        self.stem = nn.Linear(d_in, width)
        self.blocks = nn.ModuleList()
        self.head = nn.Linear(width, d_out)

    def forward(self, x):
        h = self.stem(x)
        for b in self.blocks:
            h = b(h)
        return self.head(h)


def grow(model, optim, width=32):
    """One more block: made, sharded alone, and given to the optimizer as a group of its own."""
    block = Residual(width, seed=70 + len(model.blocks))
    fully_shard(block)
    model.blocks.append(block)
    optim.add_param_group({"params": list(block.parameters()), "lr": 0.7 ** len(model.blocks) * 6e-3})
