"""A small Glow-like normalizing flow on texture patches with FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from flow import Flow
from textures import Textures


class RunState(Stateful):
    def __init__(self, model, opt, data):
        self.model, self.opt, self.data, self.step = model, opt, data, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "data": self.data.gen.get_state(), "step": torch.tensor(self.step)}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.data.gen.set_state(sd["data"])
        self.step = int(sd["step"])


def main(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Flow()
    data = Textures(seed=4)

    # the first batch sets the ActNorm layers, the same one on every rank
    with torch.no_grad():
        model(Textures(seed=3).batch(128))
    for block in model.steps:
        fully_shard(block)
    fully_shard(model)

    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    run = RunState(model, opt, data)
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda n: int(n[2:]))
        dcp.load({"run": run}, checkpoint_id=os.path.join(args.resume, newest))

    while run.step < args.steps:
        x = data.batch(args.batch).tensor_split(world)[rank]
        nll = model(x)
        opt.zero_grad(set_to_none=True)
        nll.backward()
        opt.step()
        run.step += 1
        shown = nll.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"{run.step:4d} nll {shown.item() / world:.4f} nats/dim", flush=True)
        if args.out and args.save_every and run.step % args.save_every == 0:
            dcp.save({"run": run}, checkpoint_id=os.path.join(args.out, f"s_{run.step}"))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume")
    dist.init_process_group("gloo")
    main(p.parse_args())
    dist.destroy_process_group()
