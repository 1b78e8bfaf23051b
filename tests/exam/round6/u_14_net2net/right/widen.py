"""Net2Net: double the hidden width of a block without changing its function, optimizer moments included."""
import torch
from torch.distributed.fsdp import fully_shard


def full(t):
    return t.detach().full_tensor().clone()


def doubled_rows(t):
    return torch.cat([t, t])


def doubled_cols(t):
    return torch.cat([t, t], dim=1)


RULES = {  # name -> (weights, factor of the weights)
    "up.weight": (doubled_rows, 1.0),
    "up.bias": (doubled_rows, 1.0),
    "down.weight": (doubled_cols, 0.5),
    "down.bias": (torch.clone, 1.0),
    "norm.weight": (torch.clone, 1.0),
    "norm.bias": (torch.clone, 1.0),
}


def assign(dst, value):
    """Give every rank its own part of a full tensor that all ranks hold."""
    if hasattr(dst, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor
        value = distribute_tensor(value, dst.device_mesh, dst.placements, src_data_rank=None)
    dst.copy_(value)


@torch.no_grad()
def widen(old, make_block, opt):
    """Returns the wider, sharded block; `opt` gets its parameters in the place of the old ones."""
    old.reshard()
    values = {n: full(p) for n, p in old.named_parameters()}
    states = {n: opt.state.pop(p, {}) for n, p in old.named_parameters()}
    places = {}
    for group in opt.param_groups:
        for i, q in enumerate(group["params"]):
            for n, p in old.named_parameters():
                if p is q:
                    places[n] = (group, i)

    wide = make_block(2 * old.hidden)
    fully_shard(wide)
    for n, p in wide.named_parameters():
        rule, factor = RULES[n]
        value = factor * rule(values[n])
        if n.startswith("up."):  # the two halves have to be able to part
            g = torch.Generator().manual_seed(len(n))
            value = value + 1e-3 * torch.randn(value.shape, generator=g)
        assign(p, value)
        moments = {}
        for key, v in states[n].items():
            if key == "step":
                moments[key] = v.clone()
            else:
                moments[key] = torch.zeros_like(p)
                # a half column of `down` sees the same gradient, a copy of `up` half of it
                f = 0.5 if n.startswith("up.") else 1.0
                assign(moments[key], rule(full(v)) * (f if key == "exp_avg" else f * f))
        group, i = places[n]
        group["params"][i] = p
        if moments:
            opt.state[p] = moments
    return wide
