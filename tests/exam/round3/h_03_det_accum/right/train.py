import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from criterion import count_boxes, detection_sum
from data import Scenes
from model import build

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--global-batch", type=int, default=32)
parser.add_argument("--accum", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--clip", type=float, default=5.0)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--out", default="runs")
parser.add_argument("--resume", default=None)
parser.add_argument("--export", default=None)


class AppState:
    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched, self.step = model, opt, sched, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "sched": self.sched.state_dict(), "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.sched.load_state_dict(sd["sched"])
        self.step = sd["step"]


def train_step(model, batch, accum):
    """Forward and backward of one optimizer step in `accum` micro-batches."""
    total = 0.0
    micros = list(zip(*(t.chunk(accum) for t in batch)))
    num_boxes = count_boxes(batch[1])
    for i, (img, obj, box) in enumerate(micros):
        model.set_requires_gradient_sync(i == accum - 1)
        loss = detection_sum(*model(img), obj, box) / num_boxes
        loss.backward()
        total += loss.detach()
    return total


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = build()
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 5))
    app = AppState(model, opt, sched)
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d.split("-")[1]))
        dcp.load({"app": app}, checkpoint_id=os.path.join(args.resume, newest))

    data = Scenes()
    while app.step < args.steps:
        batch = data.step_slice(app.step, args.global_batch, rank, world)
        loss = train_step(model, batch, args.accum)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        opt.step()
        sched.step()
        opt.zero_grad()
        dist.all_reduce(loss)
        if rank == 0 and app.step % 4 == 0:
            print(f"step {app.step} loss {loss / world:.4f} gnorm {norm:.3f}", flush=True)
        app.step += 1
        if args.save_every and app.step % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, f"ckpt-{app.step}"))
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
