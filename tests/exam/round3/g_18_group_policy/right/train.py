"""Group-relative policy optimisation with a frozen reference model and two updates per batch of rollouts."""

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

from policy import sharded
from rollout import PROMPT, advantages, reward, sample


def answer_logp(model, ids):
    return model(ids[:, :-1]).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, PROMPT - 1 :]


def policy_loss(logp, old, ref, advantage, clip=0.2, beta=0.02):
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None])
    kl = (ref - logp).exp() - (ref - logp) - 1
    return (beta * kl - gain).mean()  # all answers have the same length, so a mean of means is the mean


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--prompts", type=int, default=8)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    policy, reference = sharded(16, True), sharded(16, False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0, eps=1e-5)

    first = 0
    if args.resume:
        first = max(int(d[4:]) for d in os.listdir(args.resume) if d.startswith("iter"))
        m, o = get_state_dict(policy, optimizer)
        state = {"policy": m, "optim": o}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"iter{first}"))
        set_state_dict(policy, optimizer, model_state_dict=state["policy"], optim_state_dict=state["optim"])

    for it in range(first, args.steps):
        mine = range(it * args.prompts, (it + 1) * args.prompts)[rank::world]
        ids = sample(policy, mine, it)
        r = reward(ids)
        with torch.no_grad():
            old, ref = answer_logp(policy, ids), answer_logp(reference, ids)
        for _ in range(2):
            loss = policy_loss(answer_logp(policy, ids), old, ref, advantages(r))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        shown = torch.stack([r.mean(), loss.detach()]) / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"iteration {it + 1} reward {shown[0]:.4f} loss {shown[1]:.5f}")
        if args.save_every and (it + 1) % args.save_every == 0:
            m, o = get_state_dict(policy, optimizer)
            dcp.save({"policy": m, "optim": o}, checkpoint_id=os.path.join(args.out, f"iter{it + 1}"))

    if args.export:
        full = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
