import torch


def small_parameters(model, patterns):
    """Ids of the parameters that get no weight decay: biases, norms, scales."""
    return {id(p) for name, p in model.named_parameters() if p.ndim < 2 or any(s in name for s in patterns)}


def make_optimizer(model, no_decay, cfg):
    decay, rest = [], []
    for p in model.parameters():
        (rest if id(p) in no_decay else decay).append(p)
    groups = [
        g
        for g in ({"params": decay, "weight_decay": cfg.weight_decay}, {"params": rest, "weight_decay": 0.0})
        if g["params"]
    ]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas)
