import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import store
from data import moons, noised
from ema import Ema
from model import Denoiser


@torch.no_grad()
def evaluate(model, x0, rank, world):
    tot = torch.zeros(())
    for j in range(2):
        x, t, eps = (v.chunk(world)[rank] for v in noised(x0, 10_000 + j, 99))
        tot += (model(x, t) - eps).square().mean()
    dist.all_reduce(tot)
    return tot.item() / (2 * world)


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export", help="file for the averaged weights")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x0 = moons(512, 1)
    torch.manual_seed(2)
    model = Denoiser()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    ema = Ema(model)
    step = 0
    if args.resume:
        scalars = store.read(args.resume, model, ema, opt)
        step = scalars["step"]
        ema.updates = scalars["ema_updates"]

    while step < args.steps:
        x, t, eps = (v.chunk(world)[rank] for v in noised(x0, step, 7))
        loss = (model(x, t) - eps).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(model)
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            store.write(args.out, step, model, ema, opt, {"step": step, "ema_updates": ema.updates})

    raw = evaluate(model, x0, rank, world)
    ema.swap(model)
    avg = evaluate(model, x0, rank, world)
    if rank == 0:
        print(f"eval raw {raw:.4f} ema {avg:.4f}")
    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
