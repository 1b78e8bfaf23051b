"""One flat file a checkpoint. Each rank writes the rows it holds to their place in the file; a reader takes the rows it
needs, however many ranks wrote it. A JSON index tells where each tensor starts."""
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def rows_of(t):
    """Local rows of a tensor sharded on dim 0, and the index of the first one."""
    if not isinstance(t, DTensor):
        return t, 0
    per = -(-t.shape[0] // t.device_mesh.size())
    return t.to_local(), min(per * t.device_mesh.get_local_rank(), t.shape[0])


def layout(tensors):
    index, at = {}, 0
    for name, t in tensors.items():
        index[name] = {"at": at, "shape": list(t.shape)}
        at += t.numel() * 4
    return index, at


def _place(entry, t):
    local, first = rows_of(t)
    width = t.numel() // t.shape[0]
    return local, entry["at"] + first * width * 4


def write(folder, tensors, meta):
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "rows.bin")
    index, size = layout(tensors)
    if dist.get_rank() == 0:
        with open(path, "wb") as f:
            f.truncate(size)
    dist.barrier()
    fd = os.open(path, os.O_WRONLY)
    for name, t in tensors.items():
        local, at = _place(index[name], t)
        if local.numel():
            os.pwrite(fd, local.detach().contiguous().numpy().tobytes(), at)
    os.fsync(fd)
    os.close(fd)
    dist.barrier()
    if dist.get_rank() == 0:
        with open(os.path.join(folder, "index.json.part"), "w") as f:
            json.dump({"tensors": index, "meta": meta}, f)
        os.replace(os.path.join(folder, "index.json.part"), os.path.join(folder, "index.json"))
    dist.barrier()


@torch.no_grad()
def read(folder, tensors):
    with open(os.path.join(folder, "index.json")) as f:
        saved = json.load(f)
    fd = os.open(os.path.join(folder, "rows.bin"), os.O_RDONLY)
    for name, t in tensors.items():
        entry = saved["tensors"][name]
        if entry["shape"] != list(t.shape):
            raise ValueError(f"{name}: {entry['shape']} in the file, {list(t.shape)} in the model")
        local, at = _place(entry, t)
        if local.numel():
            data = bytearray(os.pread(fd, local.numel() * 4, at))
            local.copy_(torch.frombuffer(data, dtype=torch.float32).view(local.shape))
    os.close(fd)
    return saved["meta"]


def newest(root):
    whole = [d for d in os.listdir(root) if os.path.exists(os.path.join(root, d, "index.json"))]
    return os.path.join(root, max(whole))
