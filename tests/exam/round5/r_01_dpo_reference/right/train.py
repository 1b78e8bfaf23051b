"""Direct preference optimisation of a small sharded policy against its frozen SFT reference."""
import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import ckpt
from data import PairStream
from dpo import dpo_loss
from policy import build_policy, frozen_copy


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--beta", type=float, default=0.3)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stream = PairStream(args.global_batch, rank, world)

    policy = build_policy()
    opt = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.01)
    reference = frozen_copy(policy)
    start = 0
    if args.resume:
        start = ckpt.load_latest(args.resume, policy, opt)

    for step in range(start, args.steps):
        chosen, rejected = stream.batch(step)
        loss, acc = dpo_loss(policy, reference, chosen, rejected, args.beta)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        stats = torch.stack([loss.detach(), acc])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step + 1} loss {stats[0] / world:.4f} preferred {stats[1] / world:.3f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            ckpt.save(args.out, step + 1, policy, opt)

    if args.export:
        full = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
