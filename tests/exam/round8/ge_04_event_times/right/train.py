import os
import sys
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from events import make_patients, pick
from model import EventModel


@dataclass
class Config:
    steps: int = 30
    batch: int = 32
    lr: float = 0.1
    save_every: int = 0
    out: str = ""
    resume: str = ""

    @classmethod
    def from_command_line(cls):
        kinds = {f.name: f.type for f in fields(cls)}
        words = iter(sys.argv[1:])
        return cls(**{(k := w.lstrip("-").replace("-", "_")): kinds[k](next(words)) for w in words})


def build(cfg):
    torch.manual_seed(2)
    model = EventModel()
    half = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**half))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**half, output_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, cfg.lr, total_steps=cfg.steps, cycle_momentum=False)
    return model, optimizer, schedule


def checkpoint_state(model, optimizer, schedule, step):
    weights, optim = get_state_dict(model, optimizer)
    return {"model": weights, "optim": optim, "schedule": schedule.state_dict(), "step": step}


def restore(folder, model, optimizer, schedule):
    newest = max(os.listdir(folder), key=lambda d: int(d.split("-")[-1]))
    state = checkpoint_state(model, optimizer, schedule, 0)
    dcp.load(state, checkpoint_id=os.path.join(folder, newest))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    schedule.load_state_dict(state["schedule"])
    return state["step"]


def main():
    cfg = Config.from_command_line()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer, schedule = build(cfg)
    train, valid = make_patients(512), make_patients(128, seed=32)
    step = restore(cfg.resume, model, optimizer, schedule) if cfg.resume else 0

    share = cfg.batch // world
    while step < cfg.steps:
        g = torch.Generator().manual_seed(700 + step)
        index = torch.randperm(512, generator=g)[:cfg.batch][rank * share:(rank + 1) * share]
        inputs, target = pick(train, index)
        loss = F.mse_loss(model(*inputs), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} mse {shown.item() / world:.5f}", flush=True)
        if cfg.save_every and step % cfg.save_every == 0:
            dcp.save(checkpoint_state(model, optimizer, schedule, step),
                     checkpoint_id=os.path.join(cfg.out, f"step-{step}"))

    with torch.no_grad():
        inputs, target = pick(valid, torch.arange(128))
        error = F.mse_loss(model(*inputs), target)
    if rank == 0:
        print(f"valid mse {error.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
