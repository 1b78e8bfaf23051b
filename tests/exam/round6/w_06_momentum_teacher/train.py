"""MoCo with a queue of keys: query encoder trained, key encoder its moving average."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (get_model_state_dict, get_state_dict, set_model_state_dict,
                                                     set_state_dict)
from torch.distributed.fsdp import fully_shard

from momentum import MomentumEncoder
from nets import Encoder, views

BATCH, QUEUE, TAU = 32, 128, 0.2


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


class Run:
    def __init__(self):
        torch.manual_seed(0)
        self.encoder = Encoder()
        self.slow = MomentumEncoder(self.encoder)
        for b in self.encoder.blocks:
            fully_shard(b)
        fully_shard(self.encoder)
        self.slow.shard_and_follow(self.encoder)
        self.optim = torch.optim.SGD(self.encoder.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
        self.queue = F.normalize(torch.randn(QUEUE, 24, generator=torch.Generator().manual_seed(2)), dim=-1)
        self.step = 0

    def state(self):
        m, o = get_state_dict(self.encoder, self.optim)
        return {"encoder": m, "optim": o, "slow": get_model_state_dict(self.slow.net),
                "queue": self.queue, "step": self.step}

    def save(self, out):
        dcp.save(self.state(), checkpoint_id=os.path.join(out, f"ck{self.step:04d}"))

    def load(self, folder):
        s = self.state()
        dcp.load(s, checkpoint_id=os.path.join(folder, sorted(os.listdir(folder))[-1]))
        set_state_dict(self.encoder, self.optim, model_state_dict=s["encoder"], optim_state_dict=s["optim"])
        set_model_state_dict(self.slow.net, s["slow"])
        self.queue, self.step = s["queue"], s["step"]

    def train_step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        a, b = (v.chunk(world)[rank] for v in views(self.step, BATCH))
        q, k = self.encoder(a), self.slow.keys(b)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T], dim=1) / TAU
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.slow.update()
        self.queue = torch.cat([self.queue[BATCH:], gather(k)])
        self.step += 1
        return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="moco")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run()
    if args.resume:
        run.load(args.resume)
    while run.step < args.steps:
        loss = run.train_step()
        if run.step % 5 == 0:
            dist.all_reduce(loss)
            a, b = views(10_000, BATCH)
            with torch.no_grad():
                agree = (run.slow.keys(a) * run.slow.keys(b)).sum(1).mean()
            if dist.get_rank() == 0:
                print(f"step {run.step} loss {loss.item() / dist.get_world_size():.4f} key agreement {agree.item():.4f}", flush=True)
        if args.save_every and run.step % args.save_every == 0:
            run.save(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
