"""Growing a trained model: the upper half starts as a copy of the lower one, its branches faded to nothing."""
import re

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def source_name(name, old_depth):
    """The tensor of the small model a tensor of the deep model comes from, and whether it is new."""
    m = re.match(r"layers\.(\d+)\.(.*)", name)
    if m is None:
        return name, False
    i = int(m.group(1))
    return f"layers.{i % old_depth}.{m.group(2)}", i >= old_depth


def like(value, target):
    if isinstance(target, DTensor):
        return distribute_tensor(value, target.device_mesh, target.placements)
    return value


@torch.no_grad()
def grow(old_model, old_opt, old_depth, new_model, new_opt):
    """Copies weights and, for the tensors that exist in both, Adam's moments."""
    old = dict(old_model.named_parameters())
    for name, p in new_model.named_parameters():
        src, fresh = source_name(name, old_depth)
        value = whole(old[src])
        if fresh and ".out." in name:
            value = torch.zeros_like(value)
        p.copy_(like(value.clone(), p))
        moments = old_opt.state[old[src]]
        new_opt.state[p] = {"step": torch.zeros(()) if fresh else moments["step"].clone()}
        for key in ("exp_avg", "exp_avg_sq"):
            m = whole(moments[key])
            new_opt.state[p][key] = like(torch.zeros_like(m) if fresh else m.clone(), p)
