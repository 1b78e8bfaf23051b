import torch
from torch.distributed.tensor import DTensor

from lora import LoRALinear


@torch.no_grad()
def merged_state(model):
    """Full state dict of the plain model with the adapters folded into the dense weights.

    weight and lora_b are both cut along their rows, so each rank folds the rows it holds; only lora_a is gathered.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LoRALinear)}
    out = {}
    for name, p in model.named_parameters():
        owner, leaf = name.rpartition(".")[::2]
        if "lora_" in leaf:
            continue
        if leaf == "weight" and owner in layers:
            layer = layers[owner]
            delta = layer.lora_b.to_local() @ layer.lora_a.full_tensor() * layer.scale
            rows = p.to_local().add_(delta)
            p = DTensor.from_local(rows, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
        out[name] = p.full_tensor().clone()
    return out
