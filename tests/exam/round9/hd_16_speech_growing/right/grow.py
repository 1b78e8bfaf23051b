"""Progressive stacking: the deeper network starts from copies of the trained layers, and so do its Adam moments."""
import torch
from torch.distributed.fsdp import fully_shard

from model import Denoiser


def build(depth, lr):
    torch.manual_seed(100 + depth)
    model = Denoiser(depth)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=lr)


def origin(name, old_depth):
    """Name of the old parameter that a parameter of the deeper network starts from."""
    parts = name.split(".")
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) % old_depth)
    return ".".join(parts)


@torch.no_grad()
def grow(old, old_opt, lr):
    old_depth = len(old.layers)
    new, new_opt = build(2 * old_depth, lr)
    source = dict(old.named_parameters())
    for name, p in new.named_parameters():
        q = source[origin(name, old_depth)]
        p.copy_(q)
        copied = int(name.split(".")[1]) >= old_depth if name.startswith("layers.") else False
        if copied and name.endswith("gain"):
            p.mul_(0.2)                       # the new layers begin close to the identity
        new_opt.state[p] = {k: v.clone() for k, v in old_opt.state[q].items()}
    return new, new_opt
