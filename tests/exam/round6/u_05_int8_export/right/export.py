"""Symmetric int8 export, one scale per tensor."""
import torch
import torch.distributed as dist


@torch.no_grad()
def export_int8(model, path=None):
    """Quantise shard by shard, so that no rank has to hold a full float tensor; rank 0 gets the result."""
    rank, world = dist.get_rank(), dist.get_world_size()
    result = {}
    for name, p in model.named_parameters():
        local = p.to_local()
        top = local.abs().max() if local.numel() else torch.zeros(())
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        scale = top.clamp(min=1e-12) / 127.0
        codes = torch.clamp(torch.round(local / scale), -127, 127).to(torch.int8)
        parts = [None] * world if rank == 0 else None
        dist.gather_object(codes, parts, dst=0)
        if rank == 0:
            result[name] = {"codes": torch.cat(parts).reshape(p.shape), "scale": scale}
    if rank == 0 and path:
        torch.save(result, path)
    return result


def dequantise(exported):
    return {n: e["codes"].float() * e["scale"] for n, e in exported.items()}
