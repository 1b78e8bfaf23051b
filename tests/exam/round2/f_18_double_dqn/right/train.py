"""Double DQN with a hard-copied target network; the replay memory is recomputed from seeds. FSDP2 on CPU."""

import argparse
import glob
import math
import os
import re
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class QNet(nn.Module):
    def __init__(self, w=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU())
        self.value, self.adv = nn.Linear(w, 1), nn.Linear(w, 3)

    def forward(self, s):
        h = self.body(s)
        a = self.adv(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


def memory(n=600):
    """Off-policy transitions of a two-dimensional point that should reach the origin."""
    g = torch.Generator().manual_seed(19)
    s = torch.randn(n, 4, generator=g)
    a = torch.randint(0, 3, (n,), generator=g)
    push = torch.stack([(a == 0).float() - (a == 1).float(), (a == 2).float() - 0.5], 1)
    vel = 0.8 * s[:, 2:] + 0.3 * push
    nxt = torch.cat([s[:, :2] + 0.5 * vel, vel], 1)
    reward = -nxt[:, :2].norm(dim=1)
    done = (nxt[:, :2].norm(dim=1) < 0.2).float()
    return s, a, reward, nxt, done


@torch.no_grad()
def sync_target(target, online):
    for t, o in zip(target.parameters(), online.parameters()):
        t.copy_(o)


def export_weights(model, path):
    full = {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone()
        for k, v in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(full, path)


class AppState(Stateful):
    def __init__(self, models, opts, meta):
        self.models, self.opts, self.meta = models, opts, meta

    def state_dict(self):
        out = {"meta": dict(self.meta)}
        for name, model in self.models.items():
            msd, osd = get_state_dict(model, self.opts.get(name, []))
            out[name] = {"model": msd, "optim": osd}
        return out

    def load_state_dict(self, sd):
        self.meta.update(sd["meta"])
        for name, model in self.models.items():
            set_state_dict(
                model, self.opts.get(name, []), model_state_dict=sd[name]["model"], optim_state_dict=sd[name]["optim"]
            )


def newest_complete(folder):
    done = [d for d in glob.glob(os.path.join(folder, "step_*")) if os.path.exists(os.path.join(d, ".metadata"))]
    return sorted(done)[-1]


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.003)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    store = memory()
    torch.manual_seed(0)
    online, target = QNet(), QNet()
    for net in (online, target):
        fully_shard(net.body)
        fully_shard(net)
    target.requires_grad_(False)
    sync_target(target, online)
    opt = torch.optim.RMSprop(online.parameters(), lr=args.lr)
    meta = {"step": 0}
    app = AppState({"online": online, "target": target}, {"online": opt}, meta)
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=newest_complete(args.resume))
    for step in range(meta["step"], args.steps):
        rows = torch.randint(0, len(store[0]), (args.batch,), generator=torch.Generator().manual_seed(step))
        s, a, r, s2, done = (t[rows.chunk(world)[rank]] for t in store)
        # one forward for both states: a single pass, a single backward
        q, q2 = online(torch.cat([s, s2])).chunk(2)
        with torch.no_grad():
            best = q2.argmax(-1, keepdim=True)
            goal = r + 0.9 * (1 - done) * target(s2).gather(-1, best).squeeze(-1)
        loss = F.huber_loss(q.gather(-1, a[:, None]).squeeze(-1), goal)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(online.parameters(), 0.5)
        opt.step()
        if (step + 1) % 5 == 0:
            target.reshard()
            sync_target(target, online)
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} td {shown.item():.5f}", flush=True)
        meta["step"] = step + 1
        if args.save_every and meta["step"] % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, f"step_{step + 1:06d}"))
    if args.export:
        export_weights(online, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
