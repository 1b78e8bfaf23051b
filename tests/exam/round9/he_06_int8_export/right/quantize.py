"""Symmetric int8 export with one scale per tensor, quantised shard by shard before gathering."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def quantize(param):
    shard = param.to_local() if isinstance(param, DTensor) else param
    peak = shard.abs().max() if shard.numel() else torch.zeros(())
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    scale = peak.clamp(min=1e-12) / 127
    q = torch.round(shard / scale).clamp(-127, 127).to(torch.int8)
    if isinstance(param, DTensor):
        q = DTensor.from_local(
            q, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        ).full_tensor()
    return {"q": q, "scale": scale}


@torch.no_grad()
def quantized_state(model):
    return {name: quantize(p.detach()) for name, p in model.named_parameters()}


def dequantized(state):
    return {name: entry["q"].float() * entry["scale"] for name, entry in state.items()}
