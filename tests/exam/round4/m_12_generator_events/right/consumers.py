import os

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from engine import EpochEnd, Progress


def printer():
    """Coroutine: gets every event by send()."""
    while True:
        event = yield
        if dist.get_rank():
            continue
        if isinstance(event, Progress):
            print(f"step {event.step} loss {event.loss:.5f} norm {event.norm:.3f}", flush=True)
        elif isinstance(event, EpochEnd):
            print(f"-- epoch {event.epoch} done after {event.step} steps", flush=True)


def decayer(opt, per_epoch_factor):
    while True:
        event = yield
        if isinstance(event, EpochEnd):
            for g in opt.param_groups:
                g["lr"] *= per_epoch_factor


def saver(out, every, model, opt, cursor):
    while True:
        event = yield
        if out and every and isinstance(event, Progress) and event.step % every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "cursor": dict(cursor), "step": event.step},
                     checkpoint_id=os.path.join(out, f"at_{event.step:05d}"))


def restore(folder, model, opt, cursor):
    m, o = get_state_dict(model, opt)
    st = {"model": m, "optim": o, "cursor": dict(cursor), "step": 0}
    dcp.load(st, checkpoint_id=os.path.join(folder, max(f for f in os.listdir(folder) if f.startswith("at_"))))
    set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["optim"])
    cursor.update(st["cursor"])
    return st["step"]
