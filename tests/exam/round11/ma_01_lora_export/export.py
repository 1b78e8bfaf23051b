import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import distribute_tensor

from model import LoRALinear


@torch.no_grad()
def merge_adapters(model):
    """Fold every low-rank update into its base weight, one block at a time."""
    for block in model.blocks:
        layers = [m for m in block.modules() if isinstance(m, LoRALinear)]
        block.unshard()
        deltas = [layer.delta() for layer in layers]
        block.reshard()
        for layer, delta in zip(layers, deltas):
            layer.weight.add_(distribute_tensor(delta, layer.weight.device_mesh, layer.weight.placements))


def export_merged(model, path, rank):
    merge_adapters(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        merged = {k: v for k, v in full.items() if "lora_" not in k}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(merged, path)
        print(f"exported {len(merged)} tensors to {path}", flush=True)
