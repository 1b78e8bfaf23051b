"""Symmetric per-tensor int8 export of a sharded model.

Each rank rounds the rows it owns, so the float weights never have to be
gathered; only int8 values travel.
"""
import torch
import torch.distributed as dist


def quantize_shard(local, scale):
    return torch.clamp(torch.round(local / scale), -127, 127).to(torch.int8)


def gather_rows(local, shape, mesh):
    """Concatenates the uneven dim-0 shards of all ranks."""
    world = mesh.size()
    chunk = -(-shape[0] // world)
    padded = torch.zeros(chunk, *shape[1:], dtype=local.dtype)
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=mesh.get_group())
    return torch.cat(parts)[: shape[0]]


@torch.no_grad()
def export_int8(model, mesh):
    """Returns {name: (int8 tensor, scale)} for matrices and {name: float tensor} for vectors."""
    out = {}
    for name, p in model.state_dict().items():
        if p.ndim < 2:
            out[name] = p.full_tensor()
            continue
        local = p.to_local()
        amax = local.abs().max() if local.numel() else torch.zeros(())
        scale = amax.clamp(min=1e-8) / 127
        out[name] = (gather_rows(quantize_shard(local, scale), p.shape, mesh), scale)
    return out


def dequantize(exported):
    return {k: v[0].float() * v[1] if isinstance(v, tuple) else v for k, v in exported.items()}
