"""Trains a language model in stages of growing depth (1, 2, 4 layers). Between the stages the model, its optimizer and
the FSDP wrapping are built anew and the state of the smaller model is carried over."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from growth import grow
from lm import ConvLM

VOCAB, DIM, LENGTH, BATCH = 24, 20, 12, 32
STAGES = [(1, 6), (2, 6), (4, 6)]  # depth, steps


def build(depth):
    torch.manual_seed(depth)
    model = ConvLM(VOCAB, DIM, depth)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)


def batch(step, rank, world):
    g = torch.Generator().manual_seed(8000 + step)
    a = torch.randint(0, VOCAB, (BATCH, 1), generator=g)
    stride = torch.randint(1, 4, (BATCH, 1), generator=g)
    ids = (a + stride * torch.arange(LENGTH)) % VOCAB
    return ids[rank * BATCH // world : (rank + 1) * BATCH // world]


def schedule():
    """(stage, depth, is first step of the stage) for every step."""
    for stage, (depth, steps) in enumerate(STAGES):
        for i in range(steps):
            yield stage, depth, i == 0


def find_newest(folder):
    names = [n for n in os.listdir(folder) if n.startswith("s")]
    name = max(names, key=lambda n: int(n[1:].split("_d")[0]))
    step, depth = name[1:].split("_d")
    return os.path.join(folder, name), int(step), int(depth)


def snapshot(model, opt):
    m, o = get_state_dict(model, opt)
    return {"model": m, "opt": o}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    done, depth = 0, STAGES[0][0]
    if args.resume:
        path, done, depth = find_newest(args.resume)
    model, opt = build(depth)
    if args.resume:
        state = snapshot(model, opt)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])

    plan = list(schedule())
    for step in range(done, len(plan)):
        stage, depth, first = plan[step]
        if first and stage > 0:
            old_model, old_opt = model, opt
            model, opt = build(depth)
            grow(old_model, old_opt, STAGES[stage - 1][0], model, opt)
            del old_model, old_opt
        ids = batch(step, rank, world)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 2 == 0:
            print(f"step {step + 1} depth {depth} loss {mean.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < len(plan):
            dcp.save(snapshot(model, opt), checkpoint_id=os.path.join(args.out, f"s{step + 1}_d{depth}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
