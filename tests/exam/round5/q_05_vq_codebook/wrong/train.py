import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from autoencoder import FrameVQ
from data import clips, stream


class App(Stateful):
    def __init__(self, model, opt):
        self.model, self.opt, self.step = model, opt, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.step = sd["step"]


def write(app, folder, keep=10):
    dcp.save({"app": app}, checkpoint_id=f"{folder}/it{app.step:04d}")
    if dist.get_rank() == 0:
        for old in sorted(os.listdir(folder))[:-keep]:
            shutil.rmtree(os.path.join(folder, old))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--beta", type=float, default=0.25)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = FrameVQ()
    fully_shard(model.enc)
    fully_shard(model.dec)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    app = App(model, opt)
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=f"{args.resume}/{max(os.listdir(args.resume))}")

    x = clips(96, 12, 20, seed=8)
    for step, frames in stream(x, args.batch, rank, world, app.step):
        if step >= args.steps:
            break
        rec, commit, ids = model(frames)
        loss = (rec - frames).square().mean() + args.beta * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        app.step = step + 1
        used = torch.bincount(ids, minlength=16).float()
        stat = torch.cat([used, loss.detach()[None] / world])
        dist.all_reduce(stat)
        if rank == 0 and step % 5 == 4:
            print(f"it {step + 1} loss {stat[-1].item():.4f} codes in use {int((stat[:-1] > 0).sum())}", flush=True)
        if args.save_every and app.step % args.save_every == 0:
            write(app, args.out)

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
