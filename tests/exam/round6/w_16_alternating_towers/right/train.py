"""Matrix factorisation with towers, trained in turns: the users' side for three steps, then the items' side for two."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from model import Ratings, SideTower


class Alternating:
    turns = ("user", "user", "user", "item", "item")

    def __init__(self):
        torch.manual_seed(4)
        self.data = Ratings()
        self.towers = {"user": SideTower(100, 5), "item": SideTower(60, 7)}
        for t in self.towers.values():
            fully_shard(t)
        self.optims = {"user": torch.optim.Adam(self.towers["user"].parameters(), lr=2e-2),
                       "item": torch.optim.SGD(self.towers["item"].parameters(), lr=0.5, momentum=0.8)}
        self.scheds = {k: torch.optim.lr_scheduler.ExponentialLR(o, 0.98) for k, o in self.optims.items()}
        self.step = 0

    def encode(self, side, ids, learn):
        feat = self.data.user_feat if side == "user" else self.data.item_feat
        with torch.set_grad_enabled(learn):
            return self.towers[side](ids, feat[ids])

    def train_step(self):
        side = self.turns[self.step % len(self.turns)]
        rank, world = dist.get_rank(), dist.get_world_size()
        user, item, y = (t.chunk(world)[rank] for t in self.data.draw())
        u, bu = self.encode("user", user, side == "user")
        v, bv = self.encode("item", item, side == "item")
        loss = ((u * v).sum(1) + bu + bv - y).square().mean()
        loss.backward()
        self.optims[side].step()
        self.optims[side].zero_grad()
        self.scheds[side].step()
        self.step += 1
        return loss.detach()

    def state(self):
        out = {"step": self.step, "data_rng": self.data.g.get_state()}
        for k, t in self.towers.items():
            m, o = get_state_dict(t, self.optims[k])
            out[k] = {"model": m, "optim": o, "sched": self.scheds[k].state_dict()}
        return out

    def load(self, path):
        s = self.state()
        dcp.load(s, checkpoint_id=path)
        for k, t in self.towers.items():
            set_state_dict(t, self.optims[k], model_state_dict=s[k]["model"], optim_state_dict=s[k]["optim"])
            self.scheds[k].load_state_dict(s[k]["sched"])
        self.data.g.set_state(s["data_rng"])
        self.step = s["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Alternating()
    if args.resume:
        run.load(os.path.join(args.resume, max(os.listdir(args.resume))))
    while run.step < args.steps:
        loss = run.train_step()
        if run.step % 5 == 0:
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                print(f"step {run.step} loss {loss.item() / dist.get_world_size():.4f}", flush=True)
        if args.save_every and run.step % args.save_every == 0:
            dcp.save(run.state(), checkpoint_id=os.path.join(args.out, f"{run.step:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
