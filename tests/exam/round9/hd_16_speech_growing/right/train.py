"""Speech denoiser that grows from 1 to 2 to 4 layers during training (FSDP2 wrappers are rebuilt at each growth)."""
import argparse
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from grow import build, grow

GROW_AT = {8: 2, 16: 4}          # steps done -> new depth
STEPS, BATCH = 24, 16
LR = {1: 1e-2, 2: 7e-3, 4: 5e-3}


def batch(step, n=BATCH, frames=24, bands=16):
    g = torch.Generator().manual_seed(40_000 + step)
    centre = bands * torch.rand(n, 1, 1, generator=g)
    drift = torch.cumsum(0.4 * torch.randn(n, frames, 1, generator=g), 1)
    clean = torch.exp(-((torch.arange(bands) - centre - drift) ** 2) / 3)
    return clean + 0.4 * torch.rand(n, frames, bands, generator=g), clean


def save(folder, step, model, opt):
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "optim": o}, checkpoint_id=Path(folder) / f"s{step}_d{len(model.layers)}")


def load(folder):
    found = [(*map(int, re.findall(r"\d+", p.name)), p) for p in Path(folder).glob("s*_d*")]
    step, depth, path = max(found)
    model, opt = build(depth, LR[depth])
    m, o = get_state_dict(model, opt)
    state = {"model": m, "optim": o}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return step, model, opt


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    step, model, opt = load(args.resume) if args.resume else (0, *build(1, LR[1]))
    while step < STEPS:
        depth = GROW_AT.get(step)
        if depth and len(model.layers) < depth:
            model, opt = grow(model, opt, LR[depth])
        noisy, clean = (t.chunk(world)[rank] for t in batch(step))
        loss = (model(noisy) - clean).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 2 == 0:
            print(f"step {step} depth {len(model.layers)} mse {shown.item() / world:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, opt)

    with torch.no_grad():
        noisy, clean = batch(-1, n=64)
        before, after = (noisy - clean).square().mean(), (model(noisy) - clean).square().mean()
    if rank == 0:
        print(f"held-out mse {after.item():.5f}, without the denoiser {before.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
