"""One file per learner; a file is written again only while its learner is in training."""
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(folder, step, ensemble, opt):
    k = len(ensemble.learners) - 1
    h = ensemble.learners[k]
    blob = {"weights": get_model_state_dict(h, options=FULL), "opt": get_optimizer_state_dict(h, opt, options=FULL)}
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(blob, os.path.join(folder, f"learner{k}.pt"))
        with open(os.path.join(folder, "progress.json"), "w") as f:
            json.dump({"step": step, "learners": k + 1}, f)
    dist.barrier()


def load(folder, ensemble, make_opt):
    with open(os.path.join(folder, "progress.json")) as f:
        progress = json.load(f)
    opt = None
    for k in range(progress["learners"]):
        if k:
            ensemble.close()
        h = ensemble.grow()
        blob = torch.load(os.path.join(folder, f"learner{k}.pt"))
        set_model_state_dict(h, blob["weights"], options=FULL)
        if k == progress["learners"] - 1:
            opt = make_opt(h)
            set_optimizer_state_dict(h, opt, blob["opt"], options=FULL)
    return progress["step"], opt
