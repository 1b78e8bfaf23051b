import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from plan import Plan, rings
from stages import GrowingAutoencoder

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def grow(model, opt, lr):
    stage = model.grow()
    group = {"params": list(stage.parameters()), "lr": lr}
    if opt is None:
        return torch.optim.Adam([group])
    for old in opt.param_groups:
        old["lr"] *= 0.5
    opt.add_param_group(group)
    return opt


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--save-at", type=int, default=-1)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    plan, model, opt, begin = Plan(), GrowingAutoencoder(), None, 0

    if args.resume:
        saved = torch.load(os.path.join(args.resume, "grown.pt"))
        begin = saved["step"]
        for _ in range(saved["stages"]):
            opt = grow(model, opt, args.lr)
        set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["opt"], options=FULL)

    for step in range(begin, plan.total):
        level, fade = plan.at(step)
        while len(model.stages) <= level:
            opt = grow(model, opt, args.lr)
        image = rings(step, args.batch, 4 * 2 ** level).chunk(world)[rank]
        loss = F.mse_loss(model(image, fade), image)
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} side {4 * 2 ** level} fade {fade:.2f} loss {shown.item() / world:.6f}")
        if step + 1 == args.save_at:
            m, o = get_state_dict(model, opt, options=FULL)
            if rank == 0:
                torch.save({"model": m, "opt": o, "step": step + 1, "stages": len(model.stages)},
                           os.path.join(args.out, "grown.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
