import argparse
import copy
import math

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ckpt import Run
from data import TwoViewSet
from dino import Backbone, DINOLoss, ema_


def parse():
    p = argparse.ArgumentParser("tiny DINO")
    p.add_argument("--steps", type=int, default=32)
    p.add_argument("--batch", type=int, default=48)
    p.add_argument("--lr", type=float, default=5e-2)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="dino_out")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def shard(net):
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net, reshard_after_forward=True)


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    student = Backbone()
    teacher = copy.deepcopy(student).requires_grad_(False)
    student, teacher = shard(student), shard(teacher)
    criterion = DINOLoss(24)
    opt = torch.optim.SGD(student.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    run = Run(student, teacher, opt, criterion)
    if args.resume:
        run.restore(args.resume)

    data = TwoViewSet()
    while run.step < args.steps:
        frac = run.step / args.steps
        for group in opt.param_groups:
            group["lr"] = args.lr * min(1.0, (run.step + 1) / 5) * 0.5 * (1 + math.cos(math.pi * frac))
        v1, v2 = (v.chunk(world)[rank] for v in data.batch(run.step, args.batch))
        with torch.no_grad():
            t = [teacher(v1), teacher(v2)]
        loss = criterion([student(v1), student(v2)], t)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        opt.step()
        ema_(teacher, student, 1 - 0.1 * 0.5 * (1 + math.cos(math.pi * frac)))
        run.step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {run.step:3d} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and run.step % args.save_every == 0:
            run.save(args.out)

    if args.export:
        full = {k: v.full_tensor() for k, v in teacher.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
