import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from data import Textures, stream
from moco import MoCo


def snapshot(moco, opt, step):
    model, optim = get_state_dict(moco.query, opt)
    return {
        "query": model,
        "optim": optim,
        "key": get_model_state_dict(moco.key),
        "queue": moco.queue,
        "ptr": moco.ptr,
        "step": torch.tensor(step),
    }


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="moco_run")
    ap.add_argument("--resume", type=Path)
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(9)
    moco = MoCo()
    moco.remember_shards()
    opt = torch.optim.SGD(moco.query.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
    start = 0
    if args.resume:
        st = snapshot(moco, opt, 0)
        dcp.load(st, checkpoint_id=max(args.resume.glob("moco-*")))
        set_state_dict(moco.query, opt, model_state_dict=st["query"], optim_state_dict=st["optim"])
        set_model_state_dict(moco.key, st["key"])
        moco.queue, moco.ptr, start = st["queue"], st["ptr"], int(st["step"])

    for step, v1, v2 in stream(Textures(), args.batch, start):
        if step == args.steps:
            break
        loss = moco.loss(v1.chunk(world)[rank], v2.chunk(world)[rank])
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and step % 3 == 0:
            print(f"step {step + 1} loss {loss.item() / world:.4f} ptr {moco.ptr.item()}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(moco, opt, step + 1), checkpoint_id=f"{args.out}/moco-{step + 1:06d}")

    if args.export:
        full = {
            f"{n}.{k}": v.full_tensor()
            for n, m in (("q", moco.query), ("k", moco.key))
            for k, v in m.state_dict().items()
        }
        if rank == 0:
            torch.save({**full, "queue": moco.queue}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
