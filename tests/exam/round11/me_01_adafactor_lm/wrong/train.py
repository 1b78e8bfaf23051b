import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from adafactor import Adafactor
from corpus import WindowSampler, make_corpus
from model import TinyLM


def save(path, step, model, opt, sampler):
    """Every rank writes its own shard; the folder counts as whole once `done` is there."""
    folder = os.path.join(path, f"step{step:05d}")
    os.makedirs(folder, exist_ok=True)
    state = {
        "step": step,
        "model": {k: v.to_local() for k, v in model.state_dict().items()},
        "opt": opt.state_dict(),
        "sampler": sampler.gen.get_state(),
    }
    torch.save(state, os.path.join(folder, f"rank{dist.get_rank()}of{dist.get_world_size()}.pt"))
    dist.barrier()
    if dist.get_rank() == 0:
        open(os.path.join(folder, "done"), "w").close()


def load(path, model, opt, sampler):
    found = [d for d in os.listdir(path) if re.fullmatch(r"step\d+", d) and os.path.exists(os.path.join(path, d, "done"))]
    folder = os.path.join(path, max(found))
    state = torch.load(os.path.join(folder, f"rank{dist.get_rank()}of{dist.get_world_size()}.pt"))
    with torch.no_grad():
        for name, p in model.state_dict().items():
            p.to_local().copy_(state["model"][name])
    opt.load_state_dict(state["opt"])
    sampler.gen.set_state(state["sampler"])
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(0)
    model = TinyLM()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    opt = Adafactor(model.parameters(), lr=args.lr)
    sampler = WindowSampler(make_corpus(48, 4000, seed=1), 24, args.batch, rank, world, seed=2)

    start = load(args.resume, model, opt, sampler) if args.resume else 0
    for step in range(start, args.steps):
        for group in opt.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 5)
        x, y = sampler.next()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt, sampler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
