"""Offline double DQN with a periodically refreshed target network."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from grid import random_play
from qnet import hard_update, sharded


def snapshot(online, target, opt, step):
    model, optim = get_state_dict(online, opt)
    return {"online": model, "optim": optim, "target": get_model_state_dict(target), "step": step}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=44)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--gamma", type=float, default=0.95)
    ap.add_argument("--sync-every", type=int, default=8)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/dqn")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(17)
    buffer = random_play()
    online, target = sharded(mesh), sharded(mesh)
    target.requires_grad_(False)
    hard_update(target, online)
    opt = torch.optim.Adam(online.parameters(), lr=args.lr)

    step = 0
    if args.resume:
        sd = snapshot(online, target, opt, 0)
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(online, opt, model_state_dict=sd["online"], optim_state_dict=sd["optim"])
        set_model_state_dict(target, sd["target"])
        step = sd["step"]

    while step < args.steps:
        g = torch.Generator().manual_seed(step)
        idx = torch.randint(len(buffer[0]), (args.batch,), generator=g).chunk(world)[rank]
        s, a, r, s2, done = (t[idx] for t in buffer)
        with torch.no_grad():
            best = online(s2).argmax(1, keepdim=True)
            goal = r + args.gamma * (1 - done) * target(s2).gather(1, best).squeeze(1)
        q = online(s).gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, goal)
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if step % args.sync_every == 0:
            hard_update(target, online)

        stats = torch.stack([loss.detach(), q.detach().mean()])
        dist.all_reduce(stats)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} td {stats[0] / world:.5f} mean q {stats[1] / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(online, target, opt, step), checkpoint_id=f"{args.out}/{step:07d}")

    if args.export:
        both = {n: {k: v.full_tensor() for k, v in m.state_dict().items()} for n, m in (("online", online), ("target", target))}
        if rank == 0:
            torch.save(both, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
