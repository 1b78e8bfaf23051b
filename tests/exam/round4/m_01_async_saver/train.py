import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from data import Batches
from model import build
from saver import AsyncSaver, restore


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--stop-at", type=int, default=None, help="leave early, as a preempted job does")
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default=None)
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    return ap.parse_args()


def lr_at(step, total, peak):
    warm = min(1.0, (step + 1) / 5)
    return peak * warm * (1.0 - 0.7 * step / total)


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = build(mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    batches = Batches(args.batch, rank, world)

    start = restore(args.resume, model, opt, rank, world) if args.resume else 0
    saver = AsyncSaver(args.out, rank, world) if args.out else None

    for step in range(start, args.stop_at or args.steps):
        for group in opt.param_groups:
            group["lr"] = lr_at(step, args.steps, args.lr)
        x, y = batches(step)
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if saver:
            saver.poll(step + 1)
            if args.save_every and (step + 1) % args.save_every == 0:
                saver.save(step + 1, model, opt)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1:3d} loss {shown.item() / world:.5f}", flush=True)

    if saver:
        saver.close()
    if args.export:
        full = {n: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
