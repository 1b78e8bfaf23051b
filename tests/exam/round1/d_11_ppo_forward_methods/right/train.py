"""PPO: environments are spread over the ranks, the agent is sharded, a checkpoint holds every environment."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from agent import make_agent
from algo import all_mean, ppo_epochs
from world import ACTIONS, OBS, Fleet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=22, help="rollouts")
    ap.add_argument("--envs", type=int, default=8)
    ap.add_argument("--length", type=int, default=12)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    agent = make_agent(OBS, ACTIONS)
    optim = torch.optim.Adam(agent.parameters(), lr=4e-3, eps=1e-4)
    fleet = Fleet(args.envs, rank, world)

    def state(step):
        m, o = get_state_dict(agent, optim)
        # the environments are keyed by their number, so another number of ranks finds its own
        return {
            "agent": m,
            "optim": o,
            "step": step,
            "envs": {str(i): e.state_dict() for i, e in zip(fleet.ids, fleet.envs)},
        }

    start = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda n: int(n.removeprefix("rollout")))
        s = state(0)
        dcp.load(s, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(agent, optim, model_state_dict=s["agent"], optim_state_dict=s["optim"])
        for i, e in zip(fleet.ids, fleet.envs):
            e.load_state_dict(s["envs"][str(i)])
        start = s["step"]

    for step in range(start, args.steps):
        batch = fleet.collect(agent, args.length)
        (loss, kl), epochs = ppo_epochs(agent, optim, batch, 3, 2, 0.2, 0.05, step, args.envs)
        gain = all_mean(batch["reward"].mean())
        if rank == 0:
            print(f"rollout {step:3d} loss {loss:+.4f} kl {kl:.4f} epochs {epochs} reward {gain:+.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(args.out, f"rollout{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
