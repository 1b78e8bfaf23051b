import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

from data import Markov
from model import Net
from muon import Muon


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--global-batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)

    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith(("blocks", "mix"))]
    ids = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optims = [Muon(hidden, lr=0.03, weight_decay=0.01), torch.optim.AdamW(rest, lr=5e-3)]

    start = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda s: int(s.split("-")[1]))
        msd, osd = get_state_dict(model, optims)
        state = {"model": msd, "optim": osd, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optims, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    data, per = Markov(), args.global_batch // world
    for step in range(start, args.steps):
        x, y = data.batch(step, args.global_batch)
        x, y = x[rank * per:(rank + 1) * per], y[rank * per:(rank + 1) * per]
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for o in optims:
            o.step()
            o.zero_grad()
        shown = loss.detach()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            msd, osd = get_state_dict(model, optims)
            dcp.save({"model": msd, "optim": osd, "step": step + 1},
                     checkpoint_id=os.path.join(args.out, f"step-{step + 1}"))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
