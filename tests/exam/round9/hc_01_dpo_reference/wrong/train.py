"""DPO on synthetic preference pairs with a sharded policy and a sharded frozen reference."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import checkpoint
from data import PreferencePairs
from model import Policy, completion_logp


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--beta", type=float, default=0.2)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--out", default=None)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", default=None)
    return p.parse_args()


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(0)
    policy = shard(Policy(), mesh)
    reference = shard(Policy(), mesh).requires_grad_(False).eval()
    data = PreferencePairs()

    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))

    start = 0
    if args.resume:
        start = checkpoint.load(args.resume, policy, optimizer, scheduler)
    # the reference is the policy that DPO starts from
    reference.load_state_dict(policy.state_dict())

    for step in range(start, args.steps):
        chosen, rejected = data.batch(step, args.batch, rank, world)
        ids = torch.cat([chosen, rejected])
        with torch.no_grad():
            ref_c, ref_r = completion_logp(reference, ids, data.prompt_len).chunk(2)
        pol_c, pol_r = completion_logp(policy, ids, data.prompt_len).chunk(2)
        margin = args.beta * ((pol_c - ref_c) - (pol_r - ref_r))
        loss = -F.logsigmoid(margin).mean()

        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

        stats = torch.stack([loss.detach(), margin.detach().mean()]) / world
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step + 1} loss {stats[0]:.6f} margin {stats[1]:.6f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            checkpoint.save(args.out, step + 1, policy, optimizer, scheduler)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
