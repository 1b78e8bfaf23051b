import math

from torch.optim.lr_scheduler import LambdaLR

from encoder import layers_by_depth


def param_groups(model, lr):
    return [{"params": list(layer.parameters()), "lr": lr} for layer in layers_by_depth(model)]


def warmup_cosine(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def layerwise_scheduler(optim, warmup, total, decay):
    """One curve per group; each layer further from the head has a rate smaller by the factor `decay`
    and a warm-up longer by one step."""
    curves = []
    count = len(optim.param_groups)
    for depth in range(count):
        below = count - 1 - depth
        curves.append(lambda step, below=below: decay**below * warmup_cosine(step, warmup + below, total))
    return LambdaLR(optim, curves)
