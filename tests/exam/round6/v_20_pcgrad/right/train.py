"""Multi-task regression with gradient surgery on sharded gradients."""
import argparse
import os
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from model import MultiTask
from surgery import GradientSurgery


@dataclass
class Args:
    steps: int = 24
    tasks: int = 3
    batch: int = 32
    lr: float = 5e-3
    save_every: int = 0
    out: str = "multitask"
    resume: str = ""
    export: str = ""

    @classmethod
    def parse(cls):
        ap = argparse.ArgumentParser()
        for f in fields(cls):
            ap.add_argument("--" + f.name.replace("_", "-"), type=type(f.default), default=f.default)
        return cls(**vars(ap.parse_args()))


def task_batch(step, task, size):
    g = torch.Generator().manual_seed(50 + task)
    w = torch.randn(10, generator=g)
    shared = torch.randn(10, generator=torch.Generator().manual_seed(49))
    x = torch.randn(size, 10, generator=torch.Generator().manual_seed(10 * step + task))
    sign = -1.0 if task == 1 else 1.0
    return x, torch.tanh(sign * (x @ shared)) + 0.5 * torch.tanh(x @ w)


def main():
    args = Args.parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(asdict(args))
    torch.manual_seed(66)
    model = MultiTask(args.tasks)
    fully_shard(model.trunk)
    for head in model.heads:
        fully_shard(head)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    surgery = GradientSurgery(model.parameters(), seed=67)
    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "order": surgery.generator.get_state(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        surgery.generator.set_state(state["order"])
        step = state["step"]

    n = args.batch // world
    while step < args.steps:
        losses = torch.zeros(args.tasks)
        for task in range(args.tasks):
            x, y = (t[rank * n : (rank + 1) * n] for t in task_batch(step, task, args.batch))
            loss = F.mse_loss(model(x, task), y)
            loss.backward()
            surgery.collect()
            losses[task] = loss.detach() / world
        conflicts = surgery.combine()
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(losses)
        if rank == 0:
            print(f"step {step} loss {losses.sum():.5f} conflicts {conflicts}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            state = {"model": m, "opt": o, "order": surgery.generator.get_state(), "step": step}
            dcp.save(state, checkpoint_id=os.path.join(args.out, str(step)))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
