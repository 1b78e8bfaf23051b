import argparse
import math

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import shardfile
from network import Pyramid
from stages import PLAN, enter, stage_of


def windows(n=512, seed=110):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(40.0)
    start, fast, amp = (torch.rand(n, 1, generator=g) for _ in range(3))
    series = torch.sin(2 * math.pi * (t / 40 + start)) + (0.3 + amp) * torch.sin(2 * math.pi * (t / 6 + fast))
    series = series + 0.05 * torch.randn(n, 40, generator=g)
    return series[:, :32], series[:, 32:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = Pyramid()
    for level in model.levels:
        fully_shard(level)
    fully_shard(model)
    x, y = windows()

    step, stage, momentum = 0, None, {}
    if args.resume:
        facts, arrays = shardfile.read(args.resume)
        for n, p in model.named_parameters():
            shardfile.put(p, arrays["weight/" + n])
        step, stage = facts["step"], facts["stage"]
        optim, live = enter(model, stage)
        for n, p in live.items():
            buffer = optim.state[p]["momentum_buffer"] = torch.zeros_like(p)
            shardfile.put(buffer, arrays["momentum/" + n])

    while step < PLAN[-1].until:
        if stage_of(step) != stage:
            stage = stage_of(step)
            optim, live = enter(model, stage)
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:args.batch].chunk(world)[rank]
        loss = (model(x[rows]) - y[rows]).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        step += 1
        if step % 4 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"stage {stage} step {step} loss {shown.item() / world:.6f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            named = {"weight/" + n: p for n, p in model.named_parameters()}
            named.update({"momentum/" + n: optim.state[p]["momentum_buffer"] for n, p in live.items()})
            shardfile.write(args.out, named, {"step": step, "stage": stage})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
