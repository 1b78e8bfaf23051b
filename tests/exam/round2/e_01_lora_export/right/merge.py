import torch


@torch.no_grad()
def merge_lora(full_state, scale):
    merged = {}
    for name, w in full_state.items():
        if "lora_" in name:
            continue
        if name.endswith(".base.weight"):
            stem = name[: -len("base.weight")]
            delta = full_state[stem + "lora_b"] @ full_state[stem + "lora_a"]
            w = w + scale * delta
        merged[name.replace(".base.", ".")] = w.clone()
    return merged
