import torch


def build_optimizer(model, cfg):
    decay, no_decay, head = [], [], []
    for name, p in model.named_parameters():
        if name.startswith("head."):
            head.append(p)
        elif p.ndim < 2 or "embed" in name or name == "pos":
            no_decay.append(p)
        else:
            decay.append(p)
    o = cfg.optim
    groups = [
        {"params": decay, "weight_decay": o.weight_decay, "lr": o.lr},
        {"params": no_decay, "weight_decay": 0.0, "lr": o.lr},
        {"params": head, "weight_decay": o.weight_decay, "lr": o.lr * o.head_lr_scale},
    ]
    opt = torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / o.warmup))
    return opt, sched
