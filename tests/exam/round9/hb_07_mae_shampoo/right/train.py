import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mae import TinyMAE
from shampoo import OneSidedShampoo


def pictures(n, gen):
    k = torch.rand(n, 2, 1, 1, generator=gen) * 0.4
    ph = torch.rand(n, 1, 1, generator=gen) * 6.28
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    return torch.sin(k[:, 0] * xx + k[:, 1] * yy + ph)


def batches(steps, size, gen, rank, world, n_patches=16):
    """Yields the local rows of each global batch: pictures and their patch orders."""
    for _ in range(steps):
        x = pictures(size, gen)
        order = torch.rand(size, n_patches, generator=gen).argsort(1)
        yield x[rank::world], order[rank::world]


def local(p):
    return p.to_local() if isinstance(p, DTensor) else p


def save(folder, step, model, opt, gen):
    os.makedirs(os.path.join(folder, str(step)), exist_ok=True)
    blob = {
        "params": {n: local(p).clone() for n, p in model.state_dict().items()},
        "opt": opt.state_dict(),
        "gen": gen.get_state(),
    }
    torch.save(blob, os.path.join(folder, str(step), f"shard{dist.get_rank()}of{dist.get_world_size()}.pt"))
    dist.barrier()


def load(folder, model, opt, gen):
    step = max(int(d) for d in os.listdir(folder))
    blob = torch.load(os.path.join(folder, str(step), f"shard{dist.get_rank()}of{dist.get_world_size()}.pt"))
    with torch.no_grad():
        for n, p in model.named_parameters():
            local(p).copy_(blob["params"][n])
    opt.load_state_dict(blob["opt"])
    gen.set_state(blob["gen"])
    return step


@torch.no_grad()
def validate(model):
    g = torch.Generator().manual_seed(77)
    return model(pictures(64, g), torch.rand(64, 16, generator=g).argsort(1)).item()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.003)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="state")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(31)
    model = TinyMAE()
    for blk in [*model.enc, model.dec]:
        fully_shard(blk)
    fully_shard(model)
    opt = OneSidedShampoo(model.parameters(), lr=args.lr)
    gen = torch.Generator().manual_seed(32)
    step = load(args.resume, model, opt, gen) if args.resume else 0

    for x, order in batches(args.steps - step, args.batch, gen, rank, world):
        loss = model(x, order)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 10 == 0:
            val = validate(model)
            if rank == 0:
                print(f"step {step} rank 0 loss {loss.item():.4f} val {val:.4f}")
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, opt, gen)

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()
