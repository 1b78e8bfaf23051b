import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from denoiser import Denoiser
from diffusion import Schedule, clean_batch


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    p.add_argument("--resume", type=pathlib.Path)
    p.add_argument("--export")
    return p.parse_args()


def build(rank):
    torch.manual_seed(11)
    model = Denoiser()
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    fully_shard(model, mp_policy=mp)
    return model


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(rank)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = Schedule()
    begin = 0
    if args.resume is not None:
        newest = max(args.resume.glob("it*"), key=lambda d: int(d.name[2:]))
        blob = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim)}
        dcp.load(blob, checkpoint_id=newest)
        set_model_state_dict(model, blob["model"])
        set_optimizer_state_dict(model, optim, blob["optim"])
        begin = int(newest.name[2:])

    for it in range(begin, args.steps):
        g = torch.Generator().manual_seed(77_000 + it)
        x0 = clean_batch(args.batch, g)
        noisy, t, noise = schedule.sample(x0, g)
        noisy, t, noise = (v.chunk(world)[rank] for v in (noisy, t, noise))
        optim.zero_grad()
        loss = (model(noisy, t) - noise).square().mean()
        loss.backward()
        optim.step()
        if it % 5 == 0 or it + 1 == args.steps:
            dist.all_reduce(show := loss.detach().clone())
            if rank == 0:
                print(f"it {it:3d} mse {show.item() / world:.4f}", flush=True)
        if args.save_every and (it + 1) % args.save_every == 0:
            dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim)},
                     checkpoint_id=args.out / f"it{it + 1}")

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
