"""Multi-horizon forecasting with a small TCN; the learning rate follows the validation error."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ReduceLROnPlateau

from evaluate import validation_loss
from series import Windows, make_series
from tcn import TCN


class App(Stateful):
    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched, self.step = model, opt, sched, 0

    def state_dict(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt, "sched": self.sched.state_dict(), "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.sched.load_state_dict(sd["sched"])
        self.step = sd["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.04)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/tcn")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    y = make_series()
    cut = 900
    mean, std = y[:cut].mean(), y[:cut].std()
    y = (y - mean) / std
    train, valid = Windows(y[:cut]), Windows(y[cut:])

    model = TCN()
    mesh = init_device_mesh("cpu", (world,))
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sched = ReduceLROnPlateau(opt, factor=0.5, patience=1, threshold=1e-3)
    app = App(model, opt, sched)
    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        dcp.load({"app": app}, checkpoint_id=os.path.join(args.resume, newest))

    while app.step < args.steps:
        g = torch.Generator().manual_seed(500 + app.step)
        idx = torch.randint(len(train), (args.batch,), generator=g).chunk(world)[rank]
        past, future = train.take(idx)
        loss = F.mse_loss(model(past), future)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        app.step += 1

        if app.step % args.eval_every == 0:
            val = validation_loss(model, valid, rank, world)
            sched.step(val)
            if rank == 0:
                print(f"step {app.step} val {val:.4f} lr {opt.param_groups[0]['lr']:.5f}", flush=True)
        if args.save_every and app.step % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, f"s{app.step:05d}"))

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save({"weights": full, "mean": mean, "std": std}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
