"""One file per rank with the local shards; a restart needs the same number of ranks."""
import os
import re

import torch
import torch.distributed as dist


def _local(module):
    return {n: p.to_local().clone() for n, p in module.named_parameters()}


def _opt_local(opt):
    state = [{k: (v.to_local().clone() if hasattr(v, "to_local") else v.clone()) for k, v in opt.state[p].items()}
             for g in opt.param_groups for p in g["params"]]
    return state


def save(folder, turn, nets, opts):
    os.makedirs(folder, exist_ok=True)
    for m in nets:
        m.reshard()
    blob = {"turn": turn, "world": dist.get_world_size(), "nets": [_local(m) for m in nets], "opts": [_opt_local(o) for o in opts]}
    path = os.path.join(folder, f"t{turn:05d}.r{dist.get_rank()}")
    torch.save(blob, path + ".part")
    os.replace(path + ".part", path)
    dist.barrier()


def load(folder, nets, opts):
    files = os.listdir(folder)
    turns = {}
    for f in files:
        if m := re.fullmatch(r"t(\d+)\.r(\d+)", f):
            turns.setdefault(int(m[1]), set()).add(int(m[2]))
    whole = [t for t, ranks in turns.items() if len(ranks) == dist.get_world_size()]
    if not whole:
        return 0
    turn = max(whole)
    blob = torch.load(os.path.join(folder, f"t{turn:05d}.r{dist.get_rank()}"))
    assert blob["world"] == dist.get_world_size(), "restart on the same number of ranks"
    with torch.no_grad():
        for m, saved in zip(nets, blob["nets"]):
            for n, p in m.named_parameters():
                p.to_local().copy_(saved[n])
    for opt, saved in zip(opts, blob["opts"]):
        params = [p for g in opt.param_groups for p in g["params"]]
        for p, st in zip(params, saved):
            for k, v in st.items():
                if v.ndim == 0:
                    opt.state[p][k] = v
                else:
                    buf = torch.zeros_like(p)
                    buf.to_local().copy_(v)
                    opt.state[p][k] = buf
    return turn
