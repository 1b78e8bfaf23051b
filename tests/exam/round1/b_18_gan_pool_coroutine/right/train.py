"""Least-squares GAN; the trainer is a coroutine that receives the learning-rate factor and yields numbers."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from nets import Z, sharded, spiral
from pool import FakePool


class World:
    """Everything that belongs to a checkpoint."""

    def __init__(self):
        torch.manual_seed(15)
        self.G, self.D = sharded(Z, 2), sharded(2, 1)
        self.G_avg = sharded(Z, 2, trainable=False)
        self.G_avg.load_state_dict(self.G.state_dict())
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=2e-3, betas=(0.5, 0.99))
        self.opt_d = torch.optim.RMSprop(self.D.parameters(), lr=2e-3)
        self.pool = FakePool(192, 2)

    def tree(self, step=0):
        g, og = get_state_dict(self.G, self.opt_g)
        d, od = get_state_dict(self.D, self.opt_d)
        return {
            "G": g,
            "opt_g": og,
            "D": d,
            "opt_d": od,
            "avg": get_model_state_dict(self.G_avg),
            "pool": self.pool.data,
            "filled": self.pool.filled,
            "step": torch.tensor(step),
        }

    def restore(self, path):
        t = self.tree()
        dcp.load(t, checkpoint_id=path)
        set_state_dict(self.G, self.opt_g, model_state_dict=t["G"], optim_state_dict=t["opt_g"])
        set_state_dict(self.D, self.opt_d, model_state_dict=t["D"], optim_state_dict=t["opt_d"])
        set_model_state_dict(self.G_avg, t["avg"])
        self.pool.data, self.pool.filled = t["pool"], t["filled"]
        return int(t["step"])


def trainer(w, batch, step, d_steps=2):
    rank, world = dist.get_rank(), dist.get_world_size()

    def mine(x):
        return x.chunk(world)[rank]

    factor = yield None
    while True:
        g = torch.Generator().manual_seed(step + 10**6)
        for group in w.opt_g.param_groups + w.opt_d.param_groups:
            group["lr"] = 2e-3 * factor
        for _ in range(d_steps):
            real, z = mine(spiral(batch, g)), mine(torch.randn(batch, Z, generator=g))
            with torch.no_grad():
                fake = w.G(z)
            fake = w.pool.exchange(fake, g)
            w.D.requires_grad_(True)
            loss_d = (w.D(real) - 1).square().mean() + w.D(fake).square().mean()
            loss_d.backward()
            w.opt_d.step()
            w.opt_d.zero_grad()
        z = mine(torch.randn(batch, Z, generator=g))
        loss_g = (w.D(w.G(z)) - 1).square().mean()
        loss_g.backward()
        w.opt_g.step()
        w.opt_g.zero_grad()
        w.opt_d.zero_grad()  # the generator's loss also left gradients in D
        with torch.no_grad():
            for a, p in zip(w.G_avg.parameters(), w.G.parameters()):
                a.lerp_(p, 0.1)
        step += 1
        both = torch.stack([loss_d.detach(), loss_g.detach()])
        dist.all_reduce(both)
        factor = yield step, *(both / world).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="lsgan")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    w = World()
    step = w.restore(os.path.join(args.resume, max(os.listdir(args.resume)))) if args.resume else 0
    co = trainer(w, args.batch, step)
    next(co)
    while step < args.steps:
        step, ld, lg = co.send(1 - 0.5 * step / args.steps)
        if dist.get_rank() == 0 and step % 4 == 0:
            print(f"step {step} loss_d {ld:.4f} loss_g {lg:.4f} pool {int(w.pool.filled)}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(w.tree(step), checkpoint_id=os.path.join(args.out, f"{step:07d}"))
    co.close()
    if args.export:
        full = {f"{n}.{k}": v.full_tensor() for n in ("G", "D", "G_avg") for k, v in getattr(w, n).state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
