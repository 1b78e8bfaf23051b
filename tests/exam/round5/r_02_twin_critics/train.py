"""TD3 style offline actor-critic with two critics, everything sharded."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import saver
from nets import Actor, Critic, make
from replay import Replay

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=30)
ap.add_argument("--global-batch", type=int, default=64)
ap.add_argument("--gamma", type=float, default=0.9)
ap.add_argument("--tau", type=float, default=0.1)
ap.add_argument("--save-every", type=int, default=0)
ap.add_argument("--out", default="")
ap.add_argument("--resume", default="")
ap.add_argument("--export", default="")
args = ap.parse_args()


@torch.no_grad()
def polyak(target, source, tau):
    for t, s in zip(target.parameters(), source.parameters()):
        t.lerp_(s, tau)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    replay = Replay()

    nets = {"actor": make(Actor, 0), "q1": make(Critic, 1), "q2": make(Critic, 2)}
    targets = {"actor": make(Actor, 0), "q1": make(Critic, 1), "q2": make(Critic, 2)}
    for t in targets.values():
        t.requires_grad_(False)
    opts = {n: torch.optim.Adam(net.parameters(), lr=3e-3) for n, net in nets.items()}

    tracked = {}
    for name, net in nets.items():
        tracked[name] = (net, opts[name])
    for name, net in targets.items():
        tracked[f"target_{name}"] = (net, None)

    start = saver.restore(args.resume, tracked) if args.resume else 0
    for step in range(start, args.steps):
        s, a, r, s2 = replay.sample(step, args.global_batch, rank, world)
        with torch.no_grad():
            a2 = targets["actor"](s2)
            y = r + args.gamma * torch.minimum(targets["q1"](s2, a2), targets["q2"](s2, a2))
        td = 0.0
        for q in ("q1", "q2"):
            loss = F.mse_loss(nets[q](s, a), y)
            opts[q].zero_grad()
            loss.backward()
            opts[q].step()
            td = td + loss.detach()
        if step % 2 == 1:
            nets["q1"].requires_grad_(False)
            actor_loss = -nets["q1"](s, nets["actor"](s)).mean()
            opts["actor"].zero_grad()
            actor_loss.backward()
            opts["actor"].step()
            nets["q1"].requires_grad_(True)
            for n in nets:
                polyak(targets[n], nets[n], args.tau)
        dist.all_reduce(td)
        if rank == 0:
            print(f"step {step + 1} td {td.item() / world:.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            saver.save(args.out, step + 1, tracked)

    if args.export:
        opt = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = {n: get_model_state_dict(net, options=opt) for n, net in nets.items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


main()
