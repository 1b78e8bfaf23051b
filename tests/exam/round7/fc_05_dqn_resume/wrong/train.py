"""Double DQN with a periodically refreshed target network. Online and target nets are both sharded."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from replay import Replay
from world import ChainWorld


class QNet(nn.Module):
    def __init__(self, obs=12, actions=3, hidden=40):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.value = nn.Linear(hidden, 1)
        self.adv = nn.Linear(hidden, actions)

    def forward(self, x):
        h = self.body(x)
        a = self.adv(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


def build(seed):
    torch.manual_seed(seed)
    net = QNet()
    fully_shard(net.body, reshard_after_forward=True)
    fully_shard(net, reshard_after_forward=True)
    return net


@torch.no_grad()
def refresh(target, online):
    for pt, po in zip(target.parameters(), online.parameters()):
        pt.copy_(po)


class Checkpoint:
    def __init__(self, root, online, target, opt, replay, world):
        self.root, self.online, self.target, self.opt = pathlib.Path(root), online, target, opt
        self.replay, self.world = replay, world

    def state(self):
        return {"online": self.online.state_dict(), "opt": get_optimizer_state_dict(self.online, self.opt)}

    def save(self, step):
        folder = self.root / f"update{step:05d}"
        dcp.save(self.state(), checkpoint_id=folder)
        if dist.get_rank() == 0:
            torch.save({"step": step, "replay": self.replay.state_dict(), "world": self.world.state_dict()}, folder / "side.pt")
        dist.barrier()

    def load_latest(self):
        folder = sorted(self.root.glob("update*"))[-1]
        st = self.state()
        dcp.load(st, checkpoint_id=folder)
        self.online.load_state_dict(st["online"])
        refresh(self.target, self.online)
        set_optimizer_state_dict(self.online, self.opt, st["opt"])
        side = torch.load(folder / "side.pt")
        self.replay.load_state_dict(side["replay"])
        self.world.load_state_dict(side["world"])
        return side["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=40)
    ap.add_argument("--refresh-every", type=int, default=12)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    online, target = build(0), build(0)
    target.requires_grad_(False)
    opt = torch.optim.AdamW(online.parameters(), lr=3e-3)
    world, replay = ChainWorld(16), Replay(512, 12, seed=9)

    first = 0
    if args.resume:
        first = Checkpoint(args.resume, online, target, opt, replay, world).load_latest()
    for it in range(first, args.updates):
        with torch.no_grad():     # all walkers on all ranks: the buffers stay equal
            obs = world.obs()
            act = world.explore(online(obs).argmax(1), eps=max(0.1, 1 - it / 20))
            obs2, rew, done = world.step(act)
            replay.add(obs, act, rew, obs2, done)
        batch = replay.sample(args.batch)
        n = args.batch // ws
        s, a, r, s2, done = (x[rank * n:(rank + 1) * n] for x in batch)
        with torch.no_grad():
            best = online(s2).argmax(1, keepdim=True)
            y = r + 0.9 * (1 - done) * target(s2).gather(1, best).squeeze(1)
        q = online(s).gather(1, a.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(q, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (it + 1) % args.refresh_every == 0:
            refresh(target, online)
        mean = loss.detach() / ws
        dist.all_reduce(mean)
        if rank == 0 and (it + 1) % 5 == 0:
            print(f"update {it + 1} td loss {mean.item():.5f}", flush=True)
        if args.save_every and (it + 1) % args.save_every == 0:
            Checkpoint(args.out, online, target, opt, replay, world).save(it + 1)

    if args.export:
        out = {name: {k: v.full_tensor() for k, v in net.state_dict().items()} for name, net in (("online", online), ("target", target))}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
