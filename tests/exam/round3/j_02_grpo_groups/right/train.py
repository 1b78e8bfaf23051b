"""Group-relative policy optimisation (several samples per prompt, no critic) with FSDP2."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from policy import Policy, logp_of
from rollout import collect
from task import Task


def build(seed):
    torch.manual_seed(seed)
    net = Policy()
    ref = copy.deepcopy(net).requires_grad_(False)
    for m in (net, ref):
        fully_shard(m.body)
        fully_shard(m)
    return net, ref


def surrogate(policy, ref, ro, clip, kl_coef):
    logp = logp_of(policy(ro.prompt), ro.answer)
    ratio = torch.exp(logp - ro.old_logp)
    gain = torch.minimum(ratio * ro.advantage, ratio.clamp(1 - clip, 1 + clip) * ro.advantage)
    with torch.no_grad():
        ref_logp = logp_of(ref(ro.prompt), ro.answer)
    d = ref_logp - logp
    kl = torch.exp(d) - d - 1
    return (-gain + kl_coef * kl).mean(), kl.mean().detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=20)
    ap.add_argument("--inner", type=int, default=2)
    ap.add_argument("--prompts", type=int, default=16)
    ap.add_argument("--group", type=int, default=4)
    ap.add_argument("--clip", type=float, default=0.2)
    ap.add_argument("--kl", type=float, default=0.02)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert args.prompts % world == 0

    task = Task()
    policy, ref = build(3)
    optim = torch.optim.Adam(policy.parameters(), lr=args.lr, eps=1e-5)

    for round_ in range(args.rounds):
        ro = collect(policy, task, round_, args.prompts, args.group, rank, world)
        for _ in range(args.inner):
            loss, kl = surrogate(policy, ref, ro, args.clip, args.kl)
            optim.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optim.step()

        stats = torch.stack([loss.detach(), ro.reward.mean(), kl])
        dist.all_reduce(stats)
        stats /= world
        if rank == 0:
            print(f"round {round_:3d}  loss {stats[0]:+.4f}  reward {stats[1]:.3f}  kl {stats[2]:.4f}", flush=True)

    if args.export:
        full = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
