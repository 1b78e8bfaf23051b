"""Advantage actor-critic with two sharded networks and two optimizers."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from advantage import gae, normalise
from env import PointEnvs
from nets import Actor, Critic


class Agent:
    """The two (network, optimizer) pairs as one thing that DCP can save."""

    def __init__(self, actor, critic, lr):
        self.parts = {
            "actor": (actor, torch.optim.Adam(actor.parameters(), lr=lr)),
            "critic": (critic, torch.optim.Adam(critic.parameters(), lr=3 * lr)),
        }
        self.updates = 0

    def state_dict(self):
        sd = {"updates": self.updates}
        for name, (net, opt) in self.parts.items():
            sd[name], sd[name + "_opt"] = get_state_dict(net, opt)
        return sd

    def load_state_dict(self, sd):
        for name, (net, opt) in self.parts.items():
            set_state_dict(net, opt, model_state_dict=sd[name], optim_state_dict=sd[name + "_opt"])
        self.updates = sd["updates"]


@torch.no_grad()
def rollout(actor, critic, envs, update, horizon):
    obs = envs.reset(update)
    seen, acts, rews, vals = [], [], [], []
    for noise in envs.action_noise(update, horizon):
        act = actor(obs, noise=noise)
        seen.append(obs)
        acts.append(act)
        vals.append(critic(obs))
        obs, r = envs.step(act)
        rews.append(r)
    adv = gae(rews, vals, critic(obs))
    return torch.stack(seen), torch.stack(acts), adv, adv + torch.stack(vals), torch.stack(rews).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--envs", type=int, default=32)
    ap.add_argument("--horizon", type=int, default=6)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="agent")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    actor, critic = Actor(), Critic()
    fully_shard(actor.trunk)
    for net in (actor, critic):
        fully_shard(net)
    agent = Agent(actor, critic, args.lr)
    if args.resume:
        dcp.load({"agent": agent}, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))

    envs = PointEnvs(args.envs, rank, world)
    while agent.updates < args.steps:
        obs, act, adv, target, reward = rollout(actor, critic, envs, agent.updates, args.horizon)
        logp, entropy = actor(obs, action=act)
        policy_loss = -(logp * normalise(adv)).mean() - 1e-3 * entropy
        value_loss = (critic(obs) - target).square().mean()
        (policy_loss + value_loss).backward()
        for net, opt in agent.parts.values():
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        agent.updates += 1

        stats = torch.stack([reward, value_loss.detach()])
        dist.all_reduce(stats)
        if rank == 0:
            print(
                f"update {agent.updates:3d}  reward {stats[0] / world:.4f}  value loss {stats[1] / world:.4f}",
                flush=True,
            )
        if args.save_every and agent.updates % args.save_every == 0:
            dcp.save({"agent": agent}, checkpoint_id=os.path.join(args.out, f"u{agent.updates:06d}"))

    if args.export:
        opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = {name: get_model_state_dict(net, options=opts) for name, (net, _) in agent.parts.items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
