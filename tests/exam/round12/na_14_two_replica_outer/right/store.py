"""Per-rank files, as the replicas differ between two outer steps."""
import os

import torch


def _name(folder, step, rank):
    return os.path.join(folder, f"replica_state_{step}", f"rank{rank}.pt")


def _inner_state(model, opt):
    res = {}
    for name, p in model.named_parameters():
        s = opt.state[p]
        res[name] = {k: (v.to_local() if hasattr(v, "to_local") else v) for k, v in s.items()}
    return res


def save(folder, step, rank, model, opt, outer):
    path = _name(folder, step, rank)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    weights = {n: p.detach().to_local() for n, p in model.named_parameters()}
    torch.save({"weights": weights, "inner": _inner_state(model, opt), "outer": outer.state_dict()}, path)


@torch.no_grad()
def load_latest(folder, rank, model, opt, outer):
    steps = [int(d.rsplit("_", 1)[1]) for d in os.listdir(folder) if d.startswith("replica_state_")]
    if not steps:
        return 0
    blob = torch.load(_name(folder, max(steps), rank))
    for name, p in model.named_parameters():
        p.to_local().copy_(blob["weights"][name])
        state = {"step": blob["inner"][name]["step"]}
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(p)
            state[key].to_local().copy_(blob["inner"][name][key])
        opt.state[p] = state
    outer.load_state_dict(blob["outer"])
    return max(steps)
