"""Double Q-learning from a fixed log; the target network is copied shard by shard every few steps."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from qnet import build
from replay import Replay


@torch.no_grad()
def sync(target, online):
    for t, o in zip(target.parameters(), online.parameters(), strict=True):
        t.copy_(o)


def td_loss(online, target, batch, gamma=0.9):
    s, a, r, s2, done = batch
    with torch.no_grad():
        best = online(s2).argmax(1, keepdim=True)
        goal = r + gamma * (1 - done) * target(s2).gather(1, best).squeeze(1)
    q = online(s).gather(1, a[:, None]).squeeze(1)
    return F.smooth_l1_loss(q, goal)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--sync-every", type=int, default=5)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    online, target = build(), build(frozen=True)
    sync(target, online)
    opt = torch.optim.Adam(online.parameters(), lr=5e-3)
    log = Replay()
    for step in range(args.steps):
        loss = td_loss(online, target, log.sample(step, args.batch, rank, world))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % args.sync_every == 0:
            sync(target, online)
        dist.all_reduce(shown := loss.detach() / world)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} td loss {shown.item():.4f}", flush=True)
    sd = get_model_state_dict(online, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
