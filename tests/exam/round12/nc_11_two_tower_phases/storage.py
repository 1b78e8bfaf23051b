import os

import torch
import torch.distributed as dist


def _full(value):
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def save(folder, step, model, optimizers):
    weights = {n: _full(p) for n, p in model.named_parameters()}
    names = {p: n for n, p in model.named_parameters()}
    moments = {names[p]: {k: _full(v) for k, v in s.items()} for o in optimizers.values() for p, s in o.state.items()}
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, "part")
        torch.save({"step": step, "weights": weights, "moments": moments}, tmp)
        os.replace(tmp, os.path.join(folder, "latest.pt"))
    dist.barrier()


@torch.no_grad()
def _scatter_into(dst, src):
    """dst: sharded over the one mesh dimension along some axis; src: the whole tensor"""
    if getattr(dst, "placements", None):
        axis = dst.placements[0].dim
        n, w, r = src.shape[axis], dst.device_mesh.size(), dst.device_mesh.get_local_rank()
        per = -(-n // w)
        lo = min(r * per, n)
        src = src.narrow(axis, lo, min(per, n - lo))
        dst = dst.to_local()
    dst.copy_(src)


def load(folder, model, optimizers):
    blob = torch.load(os.path.join(folder, "latest.pt"))
    owner = {p: o for o in optimizers.values() for g in o.param_groups for p in g["params"]}
    for n, p in model.named_parameters():
        _scatter_into(p.detach(), blob["weights"][n])
        if n in blob["moments"]:
            state = {}
            for k, v in blob["moments"][n].items():
                if torch.is_tensor(v) and v.dim():
                    state[k] = torch.zeros_like(p, requires_grad=False)
                    _scatter_into(state[k], v)
                else:
                    state[k] = v
            owner[p].state[p] = state
    return blob["step"]
