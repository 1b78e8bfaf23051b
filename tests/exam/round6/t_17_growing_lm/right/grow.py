"""Gradual stacking: the model is gathered, its top stage is copied on top of it, and all is sharded anew."""
import re

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from net import GrowingLM


def build(depth):
    torch.manual_seed(50)
    model = GrowingLM(depth)
    for s in model.stages:
        fully_shard(s)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)


def snapshot(model, opt):
    # every rank gets the whole state here, since each one cuts its own part from it again
    return get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))


def restore(model, opt, weights, moments):
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=moments, options=StateDictOptions(full_state_dict=True))


def grow(model, opt):
    depth = len(model.stages)
    weights, moments = snapshot(model, opt)
    top = re.compile(rf"^stages\.{depth - 1}\.")
    for name in [n for n in weights if top.match(n)]:
        new = top.sub(f"stages.{depth}.", name)
        w = weights[name].clone()
        # the copy starts with a small say, so that the function changes little
        weights[new] = 0.25 * w if new.endswith("gate") else w
        st = moments["state"][name]
        moments["state"][new] = {"step": st["step"].clone(), "exp_avg": torch.zeros_like(w), "exp_avg_sq": st["exp_avg_sq"].clone()}
        moments["param_groups"][0]["params"].append(new)
    model, opt = build(depth + 1)
    restore(model, opt, weights, moments)
    return model, opt
