import argparse
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from callbacks import Checkpointer, ExportMerged, resume
from model import build, pretrained


def target_fn():
    """The pretrained network, shifted a little: that is what the adapters have to learn."""
    net = pretrained()
    g = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.08 * torch.randn(p.shape, generator=g))
    return net.requires_grad_(False)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--export-every", type=int, default=10)
    ap.add_argument("--export-dir")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export", help="final merged weights go into this file")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    run = SimpleNamespace(model=build(), step=0)
    run.opt = torch.optim.AdamW([p for p in run.model.parameters() if p.requires_grad], lr=5e-3, eps=1e-5)
    if args.resume:
        resume(run, args.resume)
    exporter = ExportMerged(args.export_dir, args.export_every)
    callbacks = [exporter, Checkpointer(args.out, args.save_every)]
    target = target_fn()

    while run.step < args.steps:
        g = torch.Generator().manual_seed(4000 + run.step)
        x = torch.randn(64, 16, generator=g)[rank::world]
        loss = F.mse_loss(run.model(x), target(x))
        loss.backward()
        run.opt.step()
        run.opt.zero_grad()
        run.step += 1
        for cb in callbacks:
            cb.after_step(run)
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {run.step:3d} loss {shown.item():.5f}", flush=True)

    if args.export:
        exporter.folder = "/"
        exporter.write(run, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
