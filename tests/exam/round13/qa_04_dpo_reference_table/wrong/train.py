import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from policy import Policy, reply_logps
from prefs import collect, epoch_order

VOCAB = 30


def wrap(model):
    for b in model.blocks:
        fully_shard(b)
    return fully_shard(model)


@torch.no_grad()
def reference_table(model, prefs, rank, world, chunk=16):
    """log p(chosen), log p(rejected) under the untrained policy, for every pair of the set."""
    table = torch.zeros(len(prefs), 2)
    for lo in range(0, len(prefs), chunk * world):
        ids = torch.arange(lo, min(lo + chunk * world, len(prefs)))[rank::world]
        rows, mask = prefs.rows(ids)
        table[ids] = torch.stack(reply_logps(model, rows, mask).chunk(2), -1)
    dist.all_reduce(table)
    return table


def dpo_loss(policy, ref, beta):
    margin = (policy[:, 0] - policy[:, 1]) - (ref[:, 0] - ref[:, 1])
    return -F.logsigmoid(beta * margin), margin.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--pairs", type=int, default=64)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--beta", type=float, default=0.2)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    prefs = collect(args.pairs, VOCAB)
    model = wrap(Policy(VOCAB))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    table = reference_table(model, prefs, rank, world)

    per_epoch = args.pairs // args.batch
    first, total = 0, args.epochs * per_epoch
    if args.resume:
        first = max(int(n.removeprefix("dpo")) for n in os.listdir(args.resume))
        m, o = get_state_dict(model, opt)
        dcp.load({"model": m, "optim": o}, checkpoint_id=f"{args.resume}/dpo{first}")
        set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)

    for step in range(first, total):
        epoch, at = divmod(step, per_epoch)
        mine = torch.arange(at * args.batch, (at + 1) * args.batch)[rank::world]
        ids = epoch_order(args.pairs, epoch)[mine]
        rows, mask = prefs.rows(ids)
        logps = torch.stack(reply_logps(model, rows, mask).chunk(2), -1)
        losses, margin = dpo_loss(logps, table[mine], args.beta)
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        opt.zero_grad()

        stats = torch.stack([losses.detach().mean(), (margin > 0).float().mean()]) / world
        dist.all_reduce(stats)
        if rank == 0 and (step + 1) % 4 == 0:
            print(f"epoch {epoch} step {step + 1} dpo loss {stats[0]:.4f} preferred {stats[1]:.2f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < total:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o}, checkpoint_id=f"{args.out}/dpo{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
