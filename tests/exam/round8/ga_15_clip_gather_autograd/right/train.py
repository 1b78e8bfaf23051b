"""Contrastive image-text training with negatives from all ranks."""
import argparse
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from gather import gather_rows
from towers import Clip


class App(Stateful):
    """Model, optimizer and the pair stream's position in one object that DCP can save and load."""

    def __init__(self, model, opt):
        self.model, self.opt, self.seen = model, opt, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "seen": self.seen}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.seen = sd["seen"]


class Pairs:
    def __init__(self, n=640, concepts=40):
        g = torch.Generator().manual_seed(14)
        pictures = torch.randn(concepts, 1, 8, 8, generator=g)
        words = torch.randint(30, (concepts, 5), generator=g)
        self.c = torch.randint(concepts, (n,), generator=g)
        self.img = pictures[self.c] + 0.3 * torch.randn(n, 1, 8, 8, generator=g)
        self.txt = words[self.c]

    def at(self, seen, size, rank, world):
        idx = (torch.arange(seen, seen + size) % len(self.c)).chunk(world)[rank]
        return self.img[idx], self.txt[idx]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    stop = torch.zeros(1)
    signal.signal(signal.SIGUSR1, lambda *_: stop.fill_(1))  # polite stop, e.g. from the scheduler

    torch.manual_seed(33)
    model = Clip()
    fully_shard(model.image)
    fully_shard(model.text)
    fully_shard(model)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.03, eps=1e-6)
    app, pairs = App(model, opt), Pairs()
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda d: int(d.split("=")[1]))
        dcp.load({"app": app}, checkpoint_id=os.path.join(args.resume, last))

    while app.seen < args.steps * args.batch:
        img, txt = pairs.at(app.seen, args.batch, rank, world)
        loss = model(img, txt, gather_rows)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            model.temperature.log.to_local().clamp_(max=3.0)
        app.seen += args.batch
        step = app.seen // args.batch
        if rank == 0 and step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        asked = stop.clone()
        dist.all_reduce(asked)
        if args.save_every and (step % args.save_every == 0 or asked.item()):
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, f"seen={app.seen}"))
        if asked.item():
            break

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
