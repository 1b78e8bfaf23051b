import argparse
import glob
import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from lars import LARS
from model import MaskedAutoencoder


def pictures(n=512):
    g = torch.Generator().manual_seed(31)
    t = torch.linspace(0, 6.2832, 64)
    f = torch.randint(1, 5, (n, 1), generator=g)
    x = torch.sin(f * t + 6.2832 * torch.rand(n, 1, generator=g)) + 0.05 * torch.randn(n, 64, generator=g)
    return x.view(n, 16, 4)


def masks(step, batch, tokens=16, hidden=6):
    """The same number of hidden patches in every picture."""
    g = torch.Generator().manual_seed(50000 + step)
    order = torch.rand(batch, tokens, generator=g).argsort(1)
    return order < hidden


def lr_at(step, total, peak, warm=5):
    return peak * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / total)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.5)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = MaskedAutoencoder()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = LARS(model.parameters(), lr=args.lr)

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "step": step}

    start = 0
    if args.resume:
        st = state(0)
        dcp.load(st, checkpoint_id=sorted(glob.glob(args.resume + "/ck*"))[-1])
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        start = st["step"]

    data = pictures()
    for step in range(start, args.steps):
        for group in opt.param_groups:
            group["lr"] = lr_at(step, args.steps, args.lr)
        g = torch.Generator().manual_seed(step)
        idx = torch.randint(0, len(data), (args.batch,), generator=g)
        x, m = (v.chunk(world)[rank] for v in (data[idx], masks(step, args.batch)))
        loss = model(x, m)
        loss.backward()
        opt.step()
        opt.zero_grad()
        log = loss.detach() / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} masked mse {log.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=f"{args.out}/ck{step + 1:05d}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
