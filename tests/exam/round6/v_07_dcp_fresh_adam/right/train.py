"""Two-tower click model, sharded tables, DCP checkpoints."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from checkpoint import Checkpointer
from clicks import ClickStream
from model import TwoTower


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="two_tower")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(13)
    model = TwoTower()
    fully_shard(model.user)
    fully_shard(model.item)
    fully_shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=2e-2, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.LinearLR(optim, 1.0, 0.2, total_iters=args.steps)
    stream = ClickStream()
    ckpt = Checkpointer(model, optim, sched, stream)
    step = ckpt.load_newest(args.resume) if args.resume else 0

    local = args.batch // world
    while step < args.steps:
        u, i, y = (t[rank * local : (rank + 1) * local] for t in stream.next(args.batch))
        loss = F.binary_cross_entropy_with_logits(model(u, i), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        sched.step()
        step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {shown:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            ckpt.save(args.out, step)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
