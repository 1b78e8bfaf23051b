"""Turns a tuned model with adapters into plain weights of the base architecture."""
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lora import LoRALinear


@torch.no_grad()
def merge_adapters(model):
    for block in model.blocks:
        block.unshard()
        for layer in block.children():
            if isinstance(layer, LoRALinear):
                layer.weight += layer.scale * layer.lora_b @ layer.lora_a
        block.reshard()


def merged_state_dict(model):
    merge_adapters(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {k: v for k, v in full.items() if "lora_" not in k}
