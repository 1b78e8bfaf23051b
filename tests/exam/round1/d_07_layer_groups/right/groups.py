"""Per-parameter options: lower layers learn more slowly, norms and biases do not decay."""

import re
from collections import defaultdict


def layer_of(name, depth):
    if name.startswith(("item.", "pos.")):
        return 0
    found = re.match(r"blocks\.(\d+)\.(?:attn|mlp|norm\d)\.", name)
    if found:
        return int(found.group(1)) + 1
    return depth + 1


def param_groups(model, depth, lr, decay, weight_decay):
    table = defaultdict(list)
    for name, p in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        plain = name.endswith("bias") or "norm" in name
        table[layer_of(name, depth), plain].append(p)
    groups = []
    for (layer, plain), params in sorted(table.items(), key=lambda kv: kv[0]):
        groups.append(
            {"params": params, "lr": lr * decay ** (depth + 1 - layer), "weight_decay": 0.0 if plain else weight_decay}
        )
    return groups
