"""One file for the whole run, gathered on rank 0 and scattered by hand at the start."""

import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor


def pack(model, optim):
    blob = {}
    for name, p in model.named_parameters():
        blob[name] = {"param": p.detach().full_tensor()}
        for key, value in optim.state[p].items():
            blob[name][key] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return blob


@torch.no_grad()
def unpack(blob, model, optim):
    for name, p in model.named_parameters():
        for key, value in blob[name].items():
            if key == "param":
                p.copy_(distribute_tensor(value, p.device_mesh, p.placements))
            elif isinstance(value, torch.Tensor) and value.shape == p.shape:
                optim.state[p][key] = distribute_tensor(value, p.device_mesh, p.placements)
            else:
                optim.state[p][key] = value


def save(folder, step, identity, model, optim, parts):
    blob = {
        "step": step,
        "identity": identity,
        "tensors": pack(model, optim),
        "parts": {k: v.state_dict() for k, v in parts.items()},
    }
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"run{step:05d}.pt")
        torch.save(blob, path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()


def load(folder, identity, model, optim, parts):
    path = os.path.join(folder, max(n for n in os.listdir(folder) if n.endswith(".pt")))
    blob = torch.load(path, weights_only=True)
    if blob["identity"] != identity:
        raise SystemExit(f"{path} belongs to another configuration:\n{blob['identity']}\n{identity}")
    unpack(blob["tensors"], model, optim)
    for k, v in parts.items():
        v.load_state_dict(blob["parts"][k])
    return blob["step"]
