"""Full-graph regression with the nodes divided over the ranks: hidden rows are exchanged in forward, the loss of a rank is the
sum over its own nodes divided by the number of nodes of the job."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from citygraph import NODES, build, owner_of
from keep import Keeper
from layers import sharded_gnn


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    adj, x, y = build()
    mine = (owner_of(world) == rank).nonzero().squeeze(1)

    model = sharded_gnn()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=100, eta_min=1e-3)
    keeper = Keeper(model, opt, sched)
    if args.resume:
        keeper.read(args.resume)

    while keeper.step < args.steps:
        part = F.mse_loss(model(x, mine, adj), y[mine], reduction="sum") / NODES
        opt.zero_grad()
        # the job's loss is the sum of the parts; FSDP averages over the ranks, hence the factor
        (part * world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        sched.step()
        keeper.step += 1
        whole = part.detach().clone()
        dist.all_reduce(whole)
        if rank == 0:
            print(f"step {keeper.step} loss {whole.item():.4f} own nodes {len(mine)}", flush=True)
        if args.save_every and args.out and keeper.step % args.save_every == 0:
            keeper.write(args.out)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
