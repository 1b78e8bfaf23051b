import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from curriculum import BUDGET, length_at, rows_at, tokens_before
from model import AlibiLM
from tokens import VOCAB, open_tokens, window


def global_rows(step, length, count):
    """start positions of all rows of a step; consecutive through the file"""
    first = tokens_before(step)
    return [first + i * length for i in range(count)]


def newest(folder):
    return os.path.join(folder, sorted(os.listdir(folder))[-1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = open_tokens()

    torch.manual_seed(4)
    with torch.device("meta"):
        model = AlibiLM(VOCAB)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    full_weights = AlibiLM(VOCAB).state_dict()  # small enough to be made everywhere from the same seed
    set_model_state_dict(model, full_weights, options=StateDictOptions(full_state_dict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 4) * (16 / length_at(s)) ** 0.25
    )
    step = 0
    if args.resume:
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optim": o, "scheduler": scheduler.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        scheduler.load_state_dict(state["scheduler"])
        step = state["step"]

    for step in range(step, args.steps):
        length, count = length_at(step), rows_at(step)
        starts = global_rows(step, length, count)
        mine = starts[rank * count // world : (rank + 1) * count // world]
        rows = torch.stack([window(tokens, s, length) for s in mine])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(
                f"step {step + 1} rows {count} x {length} tokens {(step + 1) * BUDGET} loss {loss.item() / world:.4f}"
            )
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, optimizer)
            state = {"model": m, "optim": o, "scheduler": scheduler.state_dict(), "step": step + 1}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"{step + 1:08d}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
