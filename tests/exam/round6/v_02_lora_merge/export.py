"""Turns a tuned model with adapters into plain weights of the base architecture."""
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import distribute_tensor

from lora import LoRALinear


@torch.no_grad()
def merge_adapters(model):
    for block in model.blocks:
        for layer in block.children():
            if isinstance(layer, LoRALinear):
                delta = layer.scale * layer.lora_b.full_tensor() @ layer.lora_a.full_tensor()
                layer.weight += distribute_tensor(delta, layer.weight.device_mesh, layer.weight.placements)


def merged_state_dict(model):
    merge_adapters(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {k: v for k, v in full.items() if "lora_" not in k}
