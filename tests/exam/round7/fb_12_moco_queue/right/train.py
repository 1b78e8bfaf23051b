import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from moco import ImageEncoder, KeyQueue, contrastive_loss, momentum_update


def two_views(n, step):
    g = torch.Generator().manual_seed(7000 + step)
    base = torch.nn.functional.interpolate(torch.randn(n, 1, 4, 4, generator=g), size=12, mode="bilinear")

    def view():
        gain = 0.7 + 0.6 * torch.rand(n, 1, 1, 1, generator=g)
        return gain * base[:, :, 2:10, 2:10] + 0.2 * torch.randn(n, 1, 8, 8, generator=g)

    return view(), view()


def sharded_encoder(seed):
    torch.manual_seed(seed)
    enc = ImageEncoder()
    fully_shard(enc.head)
    # the target never sees a backward, so it has to reshard after the forward
    return fully_shard(enc, reshard_after_forward=True)


class Run:
    def __init__(self, args):
        self.args = args
        self.online, self.target = sharded_encoder(12), sharded_encoder(12)
        self.target.requires_grad_(False)
        self.opt = torch.optim.SGD(self.online.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
        self.queue = KeyQueue(48, 16, seed=5)
        self.step = 0

    def momentum(self):
        return 1 - (1 - 0.9) * (math.cos(math.pi * self.step / self.args.steps) + 1) / 2

    def state(self):
        model, optim = get_state_dict(self.online, self.opt)
        return {"online": model, "optim": optim, "target": get_model_state_dict(self.target),
                "queue": self.queue.state_dict(), "step": self.step}

    def restore(self, folder):
        st = self.state()
        newest = max(int(d) for d in os.listdir(folder))
        dcp.load(st, checkpoint_id=f"{folder}/{newest}")
        set_state_dict(self.online, self.opt, model_state_dict=st["online"], optim_state_dict=st["optim"])
        set_model_state_dict(self.target, st["target"])
        self.queue.load_state_dict(st["queue"])
        self.step = st["step"]

    def train_step(self, rank, world):
        a, b = (v.chunk(world)[rank] for v in two_views(self.args.batch, self.step))
        momentum_update(self.target, self.online, self.momentum())
        with torch.no_grad():
            keys = self.target(b)
        loss, all_keys = contrastive_loss(self.online(a), keys, self.queue, self.args.tau, world)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.queue.push(all_keys)
        self.step += 1
        return loss.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=18)
    p.add_argument("--batch", type=int, default=20)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--tau", type=float, default=0.2)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    run = Run(args)
    if args.resume:
        run.restore(args.resume)
    while run.step < args.steps:
        loss = run.train_step(rank, world)
        if rank == 0:
            print(f"step {run.step:3d} loss {loss:.5f} queue head {run.queue.head}")
        if args.save_every and run.step % args.save_every == 0:
            dcp.save(run.state(), checkpoint_id=f"{args.out}/{run.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
