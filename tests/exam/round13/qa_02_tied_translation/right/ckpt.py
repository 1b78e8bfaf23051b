"""One file per rank: the rows it holds and its optimizer moments."""
import os

import torch
import torch.distributed as dist


def _path(folder, step):
    return os.path.join(folder, f"step{step:05d}", f"part{dist.get_rank()}of{dist.get_world_size()}.pt")


def save(folder, step, model, opt):
    path = _path(folder, step)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    weights = {n: p.detach().to_local() for n, p in model.named_parameters()}
    moments = {n: {k: v.to_local() if k != "step" else v for k, v in opt.state[p].items()} for n, p in model.named_parameters()}
    torch.save({"weights": weights, "moments": moments}, path)
    dist.barrier()


def load(folder, model, opt):
    step = max(int(d[4:]) for d in os.listdir(folder) if d.startswith("step"))
    part = torch.load(_path(folder, step))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.to_local().copy_(part["weights"][n])
            state = opt.state[p] = {k: torch.zeros_like(p) for k in ("exp_avg", "exp_avg_sq")}
            for k, v in part["moments"][n].items():
                if k == "step":
                    state[k] = v
                else:
                    state[k].to_local().copy_(v)
    return step
