"""Checkpoints as one .npz of whole arrays: weights, optimizer moments, the memories of all environments."""
import os

import numpy as np
import torch
import torch.distributed as dist


def whole(x):
    return x.full_tensor().detach().numpy()


def write(folder, chunk, model, opt, memory):
    arrays = {}
    for name, p in model.named_parameters():
        arrays["w/" + name] = whole(p)
        arrays["m/" + name] = whole(opt.state[p]["exp_avg"])
        arrays["v/" + name] = whole(opt.state[p]["exp_avg_sq"])
        arrays["t/" + name] = opt.state[p]["step"].numpy()
    parts = [torch.empty_like(memory) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, memory.contiguous())
    arrays["memory"] = torch.cat(parts).numpy()
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        np.savez(os.path.join(folder, f"chunk{chunk:05d}.npz"), chunk=np.int64(chunk), **arrays)
    dist.barrier()


def put(dst, array):
    """Copy this rank's rows of a whole array into a (possibly sharded) tensor."""
    local, src = dst.to_local(), torch.from_numpy(array)
    if local.shape != src.shape:
        src = src.chunk(dist.get_world_size())[dist.get_rank()]
    with torch.no_grad():
        local.copy_(src)


def read(folder, model, opt):
    name = sorted(f for f in os.listdir(folder) if f.endswith(".npz"))[-1]
    arrays = np.load(os.path.join(folder, name))
    for key, p in model.named_parameters():
        put(p, arrays["w/" + key])
        state = opt.state[p]
        state["step"] = torch.tensor(float(arrays["t/" + key]))
        for short, long in (("m", "exp_avg"), ("v", "exp_avg_sq")):
            state[long] = torch.zeros_like(p)
            put(state[long], arrays[f"{short}/{key}"])
    memory = torch.from_numpy(arrays["memory"]).chunk(dist.get_world_size())[dist.get_rank()].clone()
    return int(arrays["chunk"]), memory
