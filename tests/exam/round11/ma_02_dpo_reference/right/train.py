"""Direct preference optimisation of a small policy against its frozen starting point."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from checkpoint import load_checkpoint, save_checkpoint
from data import PROMPT, VOCAB, PreferencePairs
from model import GRULM, sequence_logp


def build(seed=11):
    torch.manual_seed(seed)
    model = GRULM(VOCAB)
    fully_shard(model.emb)
    fully_shard(model)
    return model


def frozen_copy(policy):
    ref = build()
    ref.load_state_dict(policy.state_dict())
    return ref.requires_grad_(False).eval()


def dpo_loss(policy, ref, chosen, rejected, beta):
    both = torch.cat([chosen, rejected])
    lp = sequence_logp(policy, both, PROMPT)
    with torch.no_grad():
        lr = sequence_logp(ref, both, PROMPT)
    ratio = lp - lr
    margin = beta * (ratio[: len(chosen)] - ratio[len(chosen):])
    return -F.logsigmoid(margin).mean(), margin.detach().mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--beta", type=float, default=0.3)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="checkpoints")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = PreferencePairs()

    policy = build()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.01)
    ref = frozen_copy(policy)
    step = 0
    if args.resume:
        step = load_checkpoint(args.resume, policy, optimizer)

    while step < args.steps:
        chosen, rejected = data.batch(step, args.batch, rank, world)
        loss, margin = dpo_loss(policy, ref, chosen, rejected, args.beta)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        stats = torch.stack([loss.detach(), margin]) / world
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step} loss {stats[0]:.4f} margin {stats[1]:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save_checkpoint(args.out, step, policy, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
