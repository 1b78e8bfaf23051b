"""One file per rank, holding nothing but local tensors; a run is resumed with as many ranks as it was saved with."""
import json
import os

import torch
import torch.distributed as dist


def _locals(opt):
    out = []
    for group in opt.param_groups:
        for p in group["params"]:
            out.append({k: v.to_local() if hasattr(v, "placements") else v for k, v in opt.state[p].items()})
    return out


def write(folder, step, model, opt, shadow):
    rank, world = dist.get_rank(), dist.get_world_size()
    place = os.path.join(folder, f"{step:06d}")
    os.makedirs(place, exist_ok=True)
    torch.save(
        {
            "weights": [p.detach().to_local() for p in model.parameters()],
            "optimizer": _locals(opt),
            "shadow": shadow.values,
            "shadow_count": shadow.count,
        },
        os.path.join(place, f"shard{rank}of{world}.pt"),
    )
    dist.barrier()
    if rank == 0:
        with open(os.path.join(folder, "latest.json"), "w") as f:
            json.dump({"step": step, "world": world}, f)
    dist.barrier()


@torch.no_grad()
def read(folder, model, opt, shadow):
    rank, world = dist.get_rank(), dist.get_world_size()
    with open(os.path.join(folder, "latest.json")) as f:
        info = json.load(f)
    if info["world"] != world:
        raise SystemExit(f"saved by {info['world']} ranks, this is a run on {world}")
    blob = torch.load(os.path.join(folder, f"{info['step']:06d}", f"shard{rank}of{world}.pt"))
    for p, w in zip(model.parameters(), blob["weights"]):
        p.to_local().copy_(w)
    # a step with zero gradients and zero lr lets the optimizer create its own state
    rates = [g["lr"] for g in opt.param_groups]
    for g in opt.param_groups:
        g["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    opt.zero_grad()
    for g, lr in zip(opt.param_groups, rates):
        g["lr"] = lr
    flat = [p for g in opt.param_groups for p in g["params"]]
    for p, saved in zip(flat, blob["optimizer"]):
        for k, v in saved.items():
            opt.state[p][k].to_local().copy_(v) if hasattr(opt.state[p][k], "placements") else opt.state[p][k].copy_(v)
    for v, s in zip(shadow.values, blob["shadow"]):
        v.copy_(s)
    shadow.count = blob["shadow_count"]
    return info["step"]
