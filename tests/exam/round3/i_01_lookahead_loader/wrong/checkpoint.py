import json
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(root, step, model, optim, sched, loader):
    path = Path(root) / f"step_{step:06d}"
    msd, osd = get_state_dict(model, optim)
    dcp.save({"model": msd, "optim": osd}, checkpoint_id=str(path))
    if dist.get_rank() == 0:
        meta = {"step": step, "sched": sched.state_dict()["last_epoch"], "loader": loader.state_dict()}
        (path / "meta.json").write_text(json.dumps(meta))
    dist.barrier()


def load(root, model, optim, sched, loader):
    path = sorted(p for p in Path(root).glob("step_*") if (p / "meta.json").exists())[-1]
    msd, osd = get_state_dict(model, optim)
    state = {"model": msd, "optim": osd}
    dcp.load(state, checkpoint_id=str(path))
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    meta = json.loads((path / "meta.json").read_text())
    sched.last_epoch = meta["sched"]
    for group, base, fn in zip(optim.param_groups, sched.base_lrs, sched.lr_lambdas):
        group["lr"] = base * fn(sched.last_epoch)
    loader.load_state_dict(meta["loader"])
    return meta["step"]
