import argparse
import os

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

from lm import LM, text
from muon import Muon


def optimizers_for(model):
    hidden = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(hidden, lr=0.03, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=6e-3, betas=(0.8, 0.95), weight_decay=0.0),
    ]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    model = LM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizers = optimizers_for(model)
    base = [[g["lr"] for g in o.param_groups] for o in optimizers]

    step = 0
    if args.resume:
        folder = max((e.path for e in os.scandir(args.resume)), key=lambda p: int(p.rsplit("-", 1)[1]))
        m, o = get_state_dict(model, optimizers)
        state = {"model": m, "optimizers": o, "step": 0}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizers"])
        step = state["step"]

    while step < args.steps:
        factor = min(1.0, 1.2 * (1 - step / args.steps))
        for optimizer, rates in zip(optimizers, base):
            for group, lr in zip(optimizer.param_groups, rates):
                group["lr"] = lr * factor
        rows = text(step, args.batch).chunk(world)[rank]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step:{step} loss:{loss.item() / world:.4f}")
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optimizers)
            dcp.save({"model": m, "optimizers": o, "step": step}, checkpoint_id=os.path.join(args.out, f"state-{step}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
