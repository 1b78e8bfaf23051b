import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from data import PairedViews
from losses import clip_loss
from model import build


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    return p.parse_args()


def save(path, model, opt, step):
    msd, osd = get_state_dict(model, opt)
    dcp.save({"model": msd, "optim": osd, "step": step}, checkpoint_id=path)


def load(folder, model, opt):
    newest = sorted(d for d in os.listdir(folder) if d.startswith("step_"))[-1]
    msd, osd = get_state_dict(model, opt)
    state = {"model": msd, "optim": osd, "step": 0}
    dcp.load(state, checkpoint_id=os.path.join(folder, newest))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(args.seed)
    model = build(mesh)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    start = load(args.resume, model, opt) if args.resume else 0

    data = PairedViews()
    local = args.global_batch // world
    for step in range(start, args.steps):
        idx = data.global_batch(step, args.global_batch, args.seed)
        idx = idx[rank * local : (rank + 1) * local]
        loss, acc = clip_loss(*model(data.img[idx], data.txt[idx]))
        opt.zero_grad()
        loss.backward()
        opt.step()
        log = torch.stack([loss.detach(), acc]) / world
        dist.all_reduce(log)
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step:3d} loss {log[0]:.5f} acc {log[1]:.3f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(os.path.join(args.out, f"step_{step + 1:06d}"), model, opt, step + 1)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
