import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import PairedData
from losses import clip_loss
from model import DualEncoder


def newest(folder):
    steps = [int(d.split("-")[1]) for d in os.listdir(folder) if d.startswith("step-")]
    return os.path.join(folder, f"step-{max(steps)}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default=None)
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DualEncoder()
    for tower in (model.image, model.text):
        for b in tower.blocks:
            fully_shard(b)
        fully_shard(tower)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.steps)
    data = PairedData(args.batch)

    start = 0
    if args.resume:
        path = newest(args.resume)
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])
        start = state["step"]

    for step in range(start, args.steps):
        pix, ids = data.get(step, rank, world)
        img, txt, scale = model(pix, ids)
        loss = clip_loss(img, txt, scale)
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step} loss {shown.item() / world:.6f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "sched": sched.state_dict(), "step": step + 1},
                     checkpoint_id=os.path.join(args.out, f"step-{step + 1}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
