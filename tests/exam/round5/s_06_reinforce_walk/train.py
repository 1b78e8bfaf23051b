import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from policy import Policy
from rollout import collect
from walk import VecWalk


def global_mean(v, world):
    v = v.clone()
    dist.all_reduce(v)
    return v / world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=30)
    ap.add_argument("--envs", type=int, default=32, help="environments over all ranks")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    n = args.envs // world

    torch.manual_seed(args.seed)
    policy = Policy()
    for layer in policy.trunk:
        fully_shard(layer)
    fully_shard(policy)
    opt = torch.optim.Adam(policy.parameters(), lr=args.lr)
    env = VecWalk(n, args.seed, first=rank * n)

    for update in range(args.updates):
        obs, actions, returns, rewards = collect(policy, env)
        mean = global_mean(returns.mean(1, keepdim=True), world)
        var = global_mean((returns - mean).square().mean(1, keepdim=True), world)
        adv = (returns - mean) / (var.sqrt() + 1e-6)

        logp = policy(obs.flatten(0, 1)).log_softmax(-1)
        chosen = logp.gather(1, actions.flatten()[:, None]).squeeze(1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        loss = -(chosen * adv.flatten()).mean() - 0.01 * entropy
        loss.backward()
        opt.step()
        opt.zero_grad()

        score = global_mean(rewards.sum(0).mean(), world)
        if rank == 0 and update % 3 == 0:
            print(f"update {update} reward/episode {score.item():.3f} loss {loss.item():.3f}", flush=True)

    sd = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
