import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from phases import enter, locate


def live_state(model, optim):
    """Optimizer state by parameter name; only the parameters of the present phase have one."""
    names = {p: n for n, p in model.named_parameters()}
    return {names[p]: dict(st) for p, st in optim.state.items()}


def printer(event):
    if dist.get_rank() == 0:
        print(f"{event.step:3d} {event.phase:5s} loss {event.loss:.4f}", flush=True)


def saver(model, folder, every):
    def consume(event):
        if every and event.step % every == 0:
            dcp.save(
                {"model": get_model_state_dict(model), "optim": live_state(model, event.optim), "step": event.step},
                checkpoint_id=os.path.join(folder, f"e{event.step:05d}"),
            )

    return consume


def reload(model, folder):
    """Returns (step, optimizer): the optimizer of the phase in which the run was interrupted."""
    path = os.path.join(folder, max(os.listdir(folder)))
    step = int(os.path.basename(path)[1:])
    phase, inside = locate(step)
    sd = get_model_state_dict(model)
    state = {"model": sd, "step": 0}
    optim = None
    if phase is not None and inside > 0:
        optim = enter(model, phase)
        names = {p: n for n, p in model.named_parameters()}
        for p in optim.param_groups[0]["params"]:
            if phase.kind == "sgd":
                optim.state[p] = {"momentum_buffer": torch.zeros_like(p)}
            else:
                optim.state[p] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        state["optim"] = {names[p]: st for p, st in optim.state.items()}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, sd)
    if optim is not None:
        by_name = dict(model.named_parameters())
        for name, st in state["optim"].items():
            optim.state[by_name[name]] = st
    assert state["step"] == step
    return step, optim
