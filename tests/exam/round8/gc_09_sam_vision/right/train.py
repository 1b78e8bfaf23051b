import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from sam import ASAM
from vit import ViT


def gratings(n, gen, classes=5, size=12):
    """Oriented gratings of random phase and contrast; the class is the orientation."""
    y = torch.randint(0, classes, (n,), generator=gen)
    angle = y * math.pi / classes + 0.15 * torch.randn(n, generator=gen)
    phase = 2 * math.pi * torch.rand(n, generator=gen)
    grid = torch.arange(size).float()
    wave = grid[None, None] * angle.cos()[:, None, None] + grid[None, :, None] * angle.sin()[:, None, None]
    x = torch.sin(1.1 * wave + phase[:, None, None]) + 0.3 * torch.randn(n, size, size, generator=gen)
    return x[:, None], y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--rho", type=float, default=0.5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = ViT()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(base, args.steps)
    sam = ASAM(model.parameters(), base, args.rho)
    gen = torch.Generator().manual_seed(31)
    test_x, test_y = gratings(240, torch.Generator().manual_seed(32))

    def everything():
        m, o = get_state_dict(model, base)
        return {"model": m, "optim": o, "sched": sched.state_dict(), "gen": gen.get_state(), "step": step}

    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda n: int(n.split("-")[1]))
        state = everything()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, base, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
        gen.set_state(state["gen"])
        step = state["step"]

    while step < args.steps:
        x, y = gratings(args.batch, gen)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        sam.first_step()
        worst = F.cross_entropy(model(x), y)
        worst.backward()
        sam.second_step()
        sched.step()
        step += 1
        report = torch.stack([loss.detach(), worst.detach()])
        dist.all_reduce(report)
        if rank == 0 and step % 3 == 0:
            here, there = (report / world).tolist()
            print(f"step {step} loss {here:.4f} at the worst point {there:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            dcp.save(everything(), checkpoint_id=os.path.join(args.out, f"step-{step}"))

    with torch.no_grad():
        right = (model(test_x.chunk(world)[rank]).argmax(1) == test_y.chunk(world)[rank]).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"test accuracy {right.item() / len(test_y):.3f}", flush=True)
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
