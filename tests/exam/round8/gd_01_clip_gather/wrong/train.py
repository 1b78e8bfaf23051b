"""Contrastive image-text pretraining of two small towers with FSDP2."""
import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gather import clip_loss
from model import TwoTowers


def make_pairs(n, vocab, seed=7):
    """Each pair has a latent code that drives both the picture and the caption."""
    g = torch.Generator().manual_seed(seed)
    code = torch.randn(n, 6, generator=g)
    paint = torch.randn(6, 3 * 12 * 12, generator=g)
    pixels = (code @ paint).view(n, 3, 12, 12) * 0.4
    pixels += 0.2 * torch.randn(pixels.shape, generator=g)
    words = (code * 1.5).round().clamp(-3, 3).long() + 3
    ids = (words + torch.arange(6) * 7).clamp(max=vocab - 1)
    return pixels, ids


def newest(folder):
    steps = [p for p in pathlib.Path(folder).glob("step_*") if (p / ".metadata").exists()]
    return max(steps, key=lambda p: int(p.name.split("_")[1]))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32, help="global batch")
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(0)
    model = TwoTowers()
    for tower in (model.image, model.text):
        fully_shard(tower, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    pixels, ids = make_pairs(512, 48)
    start = 0
    if args.resume:
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=str(newest(args.resume)))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    per_rank = args.batch // world
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(1000 + step)
        batch = torch.randperm(len(pixels), generator=g)[:args.batch]
        mine = batch[rank * per_rank:(rank + 1) * per_rank]
        image, text, scale = model(pixels[mine], ids[mine])
        loss = clip_loss(image, text, scale)
        opt.zero_grad()
        loss.backward()
        opt.step()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 4 == 3 or step + 1 == args.steps):
            print(f"step {step + 1:3d}  loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "step": step + 1},
                     checkpoint_id=os.path.join(args.out, f"step_{step + 1}"))

    if args.export:
        full = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
