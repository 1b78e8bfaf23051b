import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from model import BindingNet, library
from muon import Muon


class Optimizers:
    def __init__(self, model):
        self.model = model
        matrices, rest = [], []
        for name, p in model.named_parameters():
            (matrices if p.ndim == 2 and name.startswith("blocks") else rest).append(p)
        self.muon = Muon(matrices, lr=0.02)
        self.adam = torch.optim.Adam(rest, lr=5e-3, eps=1e-6)
        self.both = (self.muon, self.adam)
        self.warm = [torch.optim.lr_scheduler.LinearLR(o, 0.2, 1.0, total_iters=5) for o in self.both]

    def step(self):
        for o in self.both:
            o.step()
        for w in self.warm:
            w.step()
        for o in self.both:
            o.zero_grad()

    def state(self):
        return {"optim": get_optimizer_state_dict(self.model, self.both), "warm": [w.state_dict() for w in self.warm]}

    def restore(self, s):
        set_optimizer_state_dict(self.model, self.both, s["optim"])
        for w, v in zip(self.warm, s["warm"]):
            w.load_state_dict(v)


def evaluate(model, seq, y, rank, world):
    """R2 on held-out loops from summed squares over all ranks."""
    with torch.no_grad():
        err = (model(seq[rank::world]) - y[rank::world]).square().sum()
    dist.all_reduce(err)
    return 1 - err.item() / (y - y.mean(0)).square().sum().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    seq, y = library()
    model = BindingNet()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opts = Optimizers(model)

    start = 0
    if args.resume:
        start = max(int(n.split("=")[1]) for n in os.listdir(args.resume))
        s = {"model": get_model_state_dict(model), **opts.state()}
        dcp.load(s, checkpoint_id=os.path.join(args.resume, f"step={start}"))
        set_model_state_dict(model, s["model"])
        opts.restore(s)

    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(4000 + step)
        ids = torch.randint(0, 192, (32,), generator=g).chunk(world)[rank]
        loss = F.huber_loss(model(seq[ids]), y[ids])
        loss.backward()
        opts.step()
        if (step + 1) % 6 == 0 or step + 1 == args.steps:
            r2 = evaluate(model, seq[192:], y[192:], rank, world)
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item() / world:.4f} held-out R2 {r2:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save({"model": get_model_state_dict(model), **opts.state()},
                     checkpoint_id=os.path.join(args.out, f"step={step + 1}"))

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
