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
    set_model_state_dict,
    set_state_dict,
)

from ema import copy_params, ema_update, tau_at
from networks import build
from views import pictures, two_views


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32, help="global batch")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    return p.parse_args()


def snapshot(online, target, opt, step):
    m, o = get_state_dict(online, opt)
    return {"online": m, "opt": o, "target": get_model_state_dict(target), "step": step}


def restore(folder, online, target, opt):
    last = sorted(os.listdir(folder))[-1]
    state = snapshot(online, target, opt, 0)
    dcp.load(state, checkpoint_id=os.path.join(folder, last))
    set_state_dict(online, opt, model_state_dict=state["online"], optim_state_dict=state["opt"])
    set_model_state_dict(target, state["target"])
    return state["step"]


def byol(p, z):
    return 2 - 2 * F.cosine_similarity(p, z, dim=-1).mean()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    online, target = build()
    opt = torch.optim.AdamW(online.parameters(), lr=args.lr, weight_decay=0.01)

    start = 0
    copy_params(online.encoder, target)
    if args.resume:
        start = restore(args.resume, online, target, opt)

    data = pictures()
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(args.seed + step)
        x = data[torch.randint(0, len(data), (args.batch,), generator=g)]
        a, b = (v.chunk(world)[rank] for v in two_views(x, step, args.seed))
        with torch.no_grad():
            za, zb = target(a), target(b)
        pa, pb = online(torch.cat([a, b])).chunk(2)
        loss = 0.5 * (byol(pa, zb) + byol(pb, za))
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema_update(online.encoder, target, tau_at(step, args.steps))
        log = loss.detach() / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {log.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(online, target, opt, step + 1), checkpoint_id=os.path.join(args.out, f"{step + 1:06d}"))

    if args.export:
        opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
        out = {"o." + k: v for k, v in get_model_state_dict(online, options=opts).items()}
        out.update({"t." + k: v for k, v in get_model_state_dict(target, options=opts).items()})
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
