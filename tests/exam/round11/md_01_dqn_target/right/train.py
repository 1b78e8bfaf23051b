"""Double DQN with a slowly moving target network, from a replay buffer."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from qnet import DuelingQ
from replay import ACTIONS, OBS, Replay


class TargetUpdate:
    """Polyak averaging of the shards: target <- (1 - tau) * target + tau * online."""

    def __init__(self, target, online, tau):
        self.pairs = list(zip(target.parameters(), online.parameters()))
        self.tau = tau

    @torch.no_grad()
    def __call__(self):
        for t, p in self.pairs:
            t.lerp_(p.detach(), self.tau)


def td_loss(online, target, batch, gamma):
    s, a, r, s2, done = batch
    with torch.no_grad():
        best = online(s2).argmax(-1, keepdim=True)
        y = r + gamma * (1 - done) * target(s2).gather(1, best).squeeze(1)
    q = online(s).gather(1, a[:, None]).squeeze(1)
    return F.smooth_l1_loss(q, y), y.mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--gamma", type=float, default=0.9)
    ap.add_argument("--tau", type=float, default=0.2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="dqn")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(16)
    online = DuelingQ(OBS, ACTIONS)
    target = copy.deepcopy(online).requires_grad_(False)
    fully_shard(online.trunk)
    fully_shard(online)
    fully_shard(target.trunk)
    fully_shard(target, reshard_after_forward=True)
    opt = torch.optim.AdamW(online.parameters(), lr=5e-3, weight_decay=1e-4)
    follow = TargetUpdate(target, online, args.tau)
    replay = Replay()

    def snapshot(step):
        m, o = get_state_dict(online, opt)
        return {"online": m, "opt": o, "target": get_model_state_dict(target), "replay": replay.gen.get_state(), "step": step}

    start = 0
    if args.resume:
        state = snapshot(0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(online, opt, model_state_dict=state["online"], optim_state_dict=state["opt"])
        set_model_state_dict(target, state["target"])
        replay.gen.set_state(state["replay"])
        start = state["step"]

    for step in range(start, args.steps):
        loss, y = td_loss(online, target, replay.sample(args.batch, rank, world), args.gamma)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        opt.step()
        opt.zero_grad()
        follow()

        shown = torch.stack([loss.detach(), y])
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} td loss {shown[0] / world:.4f} mean target {shown[1] / world:.4f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(step + 1), checkpoint_id=os.path.join(args.out, f"dqn_{step + 1:06d}"))

    if args.export:
        full = {k: v.full_tensor() for k, v in online.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
