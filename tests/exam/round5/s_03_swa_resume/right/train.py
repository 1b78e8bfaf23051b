import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from averaging import IterateAverage
from nets import mlp


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=32)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--swa-begin", type=int, default=6)
    p.add_argument("--swa-every", type=int, default=2)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="runs")
    p.add_argument("--resume")
    p.add_argument("--export")
    return p.parse_args()


def batch_at(step, n):
    g = torch.Generator().manual_seed(31337 + step)
    proto = torch.randn(5, 10, generator=torch.Generator().manual_seed(3))
    y = torch.randint(0, 5, (n,), generator=g)
    return proto[y] + 0.8 * torch.randn(n, 10, generator=g), y


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = mlp()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.steps, eta_min=0.05)
    swa = IterateAverage(model, args.swa_begin, args.swa_every)
    state = ckpt.TrainState(model, opt, sched, swa)
    if args.resume:
        ckpt.load_newest(state, args.resume)

    while state.step < args.steps:
        x, y = batch_at(state.step, args.batch)
        loss = F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        state.step += 1
        swa.update(model, state.step)
        dist.all_reduce(mean := loss.detach().clone())
        if rank == 0 and state.step % 4 == 0:
            print(f"step={state.step} loss={mean.item() / world:.4f} lr={sched.get_last_lr()[0]:.4f}", flush=True)
        if args.save_every and state.step % args.save_every == 0:
            ckpt.save(state, args.out)

    averaged = {n: full(t).clone() for n, t in swa.avg.items()}
    if rank == 0 and args.export:
        torch.save(averaged, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
