"""Group-relative policy optimisation: sample, score, a few clipped updates on the same samples."""
import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from model import Llamalet
from reward import group_advantage, reward
from rollout import rollout, token_logp

VOCAB = 20


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument("--inner", type=int, default=2, help="optimizer steps per round")
    ap.add_argument("--prompts", type=int, default=4)
    ap.add_argument("--group", type=int, default=8)
    ap.add_argument("--new-tokens", type=int, default=6)
    ap.add_argument("--clip", type=float, default=0.2)
    ap.add_argument("--lr", type=float, default=1e-2)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(30)
    policy = Llamalet(VOCAB, dim=16, heads=2, depth=1)
    for layer in policy.layers:
        # generation calls the layers again and again: keep them gathered between the calls
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(policy, mesh=mesh)
    opt = torch.optim.Adam(policy.parameters(), lr=a.lr, eps=1e-5)

    sample_ids = torch.arange(a.prompts * a.group)[rank::world]
    for rnd in range(a.rounds):
        g = torch.Generator().manual_seed(rnd)
        prompts = torch.randint(VOCAB, (a.prompts, 3), generator=g).repeat_interleave(a.group, 0)[rank::world]
        ids = rollout(policy, prompts, sample_ids, rnd, a.new_tokens)
        adv, mean_reward = group_advantage(reward(ids, 3), a.group, rank, world)
        with torch.no_grad():
            old = token_logp(policy, ids, 3)
        for _ in range(a.inner):
            new = token_logp(policy, ids, 3)
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * adv[:, None], ratio.clamp(1 - a.clip, 1 + a.clip) * adv[:, None])
            loss = -gain.mean()          # all ranks hold the same number of tokens
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            opt.step()
        if rank == 0:
            print(f"round {rnd + 1:2d} reward {mean_reward.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
