import os

import torch
import torch.distributed as dist


def full(tree):
    if isinstance(tree, dict):
        return {k: full(v) for k, v in tree.items()}
    return tree.full_tensor() if hasattr(tree, "full_tensor") else tree


def save(folder, tick, model, opt):
    """Whole tensors in one file; the optimizer's state goes by the position of the parameter."""
    state = {"tick": tick, "model": full(model.state_dict()), "opt": full(opt.state_dict()["state"])}
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, "tmp")
        torch.save(state, tmp)
        os.replace(tmp, os.path.join(folder, f"tick_{tick:05d}.pt"))
    dist.barrier()


def newest(folder):
    return torch.load(os.path.join(folder, max(f for f in os.listdir(folder) if f.startswith("tick_"))), weights_only=True)


def _rows(whole, p):
    parts = whole.chunk(p.device_mesh.size())
    r = p.device_mesh.get_local_rank()
    return parts[r] if r < len(parts) else whole[:0]


@torch.no_grad()
def restore_model(state, model):
    for name, p in model.named_parameters():
        p.to_local().copy_(_rows(state["model"][name], p))


@torch.no_grad()
def restore_optimizer(state, opt):
    params = [p for g in opt.param_groups for p in g["params"]]
    for i, st in state["opt"].items():
        p = params[i]
        for k, v in st.items():
            if v.shape == p.shape and v.dim():
                d = torch.zeros_like(p)
                d.to_local().copy_(_rows(v, p))
                v = d
            opt.state[p][k] = v
