"""Class-conditional VAE; every few steps the Frechet distance of its samples decides which weights are kept."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from metric import Features, frechet, statistics
from vae import ClassVAE

CLASSES = 8


def pictures(y, gen):
    """Class k is a blob at the k-th place of a circle."""
    ys, xs = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    a = y * (2 * torch.pi / CLASSES)
    cy = (3.5 + 2.5 * a.sin() + 0.4 * torch.randn(y.shape, generator=gen))[:, None, None]
    cx = (3.5 + 2.5 * a.cos() + 0.4 * torch.randn(y.shape, generator=gen))[:, None, None]
    return (2 * torch.exp(-((ys - cy) ** 2 + (xs - cx) ** 2) / 3) - 0.5).flatten(1)


def mine(t, rank, world):
    return t.chunk(world)[rank]


class Evaluator:
    """Both sets are ordered by class; each rank takes a block of it."""

    def __init__(self, model, rank, world, per_class=32):
        self.model, self.rank, self.world = model, rank, world
        gen = torch.Generator().manual_seed(99)
        y = torch.arange(CLASSES).repeat_interleave(per_class)
        x = pictures(y, gen)
        z = torch.randn(len(y), model.latent, generator=gen)
        self.y, self.z = mine(y, rank, world), mine(z, rank, world)
        self.features = Features(64, 10)
        self.real = statistics(self.features(mine(x, rank, world)))

    @torch.no_grad()
    def __call__(self):
        fake = self.model(None, self.y, self.z, sample=True)
        return frechet(self.real, statistics(self.features(fake)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--eval-every", type=int, default=4)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = fully_shard(ClassVAE(), reshard_after_forward=True)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(31)
    evaluator = Evaluator(model, rank, world)
    best = {n: p.detach().clone() for n, p in model.named_parameters()}
    best_fd, best_step, step = float("inf"), 0, 0

    def everything():
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt), "best": best,
                "meta": {"step": step, "best_fd": best_fd, "best_step": best_step, "gen": gen.get_state()}}

    if args.resume:
        folder = os.path.join(args.resume, max(os.listdir(args.resume), key=int))
        sd = everything()
        dcp.load(sd, checkpoint_id=folder)
        set_model_state_dict(model, sd["model"])
        set_optimizer_state_dict(model, opt, sd["optim"])
        meta = sd["meta"]
        step, best_fd, best_step = meta["step"], meta["best_fd"], meta["best_step"]
        gen.set_state(meta["gen"])

    while step < args.steps:
        y = torch.randint(0, CLASSES, (64,), generator=gen)
        x, noise = pictures(y, gen), torch.randn(64, model.latent, generator=gen)
        loss = model(*(mine(t, rank, world) for t in (x, y, noise)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % args.eval_every == 0:
            fd = evaluator()
            if fd < best_fd:
                best_fd, best_step = fd, step
                for n, p in model.named_parameters():
                    best[n].copy_(p.detach())
            if rank == 0:
                print(f"step {step} loss {loss.item():.3f} frechet {fd:.5f} (best {best_fd:.5f} at {best_step})", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            dcp.save(everything(), checkpoint_id=os.path.join(args.out, str(step)))

    set_model_state_dict(model, best)
    if rank == 0:
        print(f"kept step {best_step}: frechet {best_fd:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
