import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from env import CorridorBatch
from policy import WalkerPolicy

EPISODES = 32
HORIZON = 24
GAMMA = 0.97


def collect(policy, env):
    """Roll all walks of this rank for HORIZON steps (finished walks idle)."""
    obs, actions, rewards, masks = [], [], [], []
    with torch.no_grad():
        for t in range(HORIZON):
            o = env.observe(t)
            logp, _ = policy(o)
            cdf = logp.exp().cumsum(dim=-1)
            a = (env.uniforms[:, t : t + 1] > cdf[:, :-1]).sum(dim=-1)
            r, alive = env.step(a, t)
            obs.append(o)
            actions.append(a)
            rewards.append(r)
            masks.append(alive)
    rewards = torch.stack(rewards)
    returns = torch.zeros_like(rewards)
    running = torch.zeros(rewards.shape[1])
    for t in reversed(range(HORIZON)):
        running = rewards[t] + GAMMA * running
        returns[t] = running
    return torch.stack(obs), torch.stack(actions), returns, torch.stack(masks).float(), rewards.sum(0)


def policy_loss(policy, batch):
    obs, actions, returns, mask, _ = batch
    logp, value = policy(obs.flatten(0, 1))
    logp, value = logp.unflatten(0, mask.shape), value.reshape(mask.shape)
    chosen = logp.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    advantage = (returns - value).detach()
    entropy = -(logp.exp() * logp).sum(-1)
    per_step = -chosen * advantage + 0.5 * (returns - value) ** 2 - 0.01 * entropy
    steps = mask.sum()
    return (per_step * mask).sum() / steps


def newest(folder):
    names = [n for n in os.listdir(folder) if n.startswith("iter_")]
    return os.path.join(folder, max(names, key=lambda n: int(n.split("_")[1])))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=40)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    policy = WalkerPolicy()
    for block in policy.blocks:
        fully_shard(block)
    fully_shard(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)

    start = 0
    if args.resume:
        state = {
            "policy": get_model_state_dict(policy),
            "optimizer": get_optimizer_state_dict(policy, optimizer),
            "iteration": 0,
        }
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_model_state_dict(policy, state["policy"])
        set_optimizer_state_dict(policy, optimizer, state["optimizer"])
        start = state["iteration"]

    per_rank = EPISODES // world
    # walks of similar length are kept together on a rank
    my_episodes = sorted(range(EPISODES), key=lambda e: (e % 2, e))[rank * per_rank : (rank + 1) * per_rank]

    for it in range(start, args.iterations):
        env = CorridorBatch(my_episodes, it, args.seed, HORIZON)
        batch = collect(policy, env)
        loss = policy_loss(policy, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        report = torch.stack([loss.detach() / world, batch[-1].sum() / EPISODES])
        dist.all_reduce(report)
        if rank == 0 and (it % 5 == 0 or it == args.iterations - 1):
            print(f"iteration {it:3d} loss {report[0]:.4f} mean return {report[1]:.4f}", flush=True)
        if args.save_every and (it + 1) % args.save_every == 0:
            state = {
                "policy": get_model_state_dict(policy),
                "optimizer": get_optimizer_state_dict(policy, optimizer),
                "iteration": it + 1,
            }
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"iter_{it + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
