"""Symmetric int8 export, one scale per weight matrix. Vectors stay in float32."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@torch.no_grad()
def quantised_state_dict(model):
    out = {}
    for name, p in model.named_parameters():
        if p.ndim < 2:
            out[name] = p.full_tensor().clone()
            continue
        local = p.to_local()
        amax = local.abs().max() if local.numel() else local.new_zeros(())
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        scale = amax.clamp_min(1e-8) / 127.0
        q = torch.round(local / scale).clamp(-127, 127).to(torch.int8)
        # quantise the shards first, so that only a byte per weight is gathered
        q = DTensor.from_local(q, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        out[name] = {"q": q.full_tensor(), "scale": scale.item()}
    return out


def dequantise(state):
    return {k: v["q"].float() * v["scale"] if isinstance(v, dict) else v for k, v in state.items()}
