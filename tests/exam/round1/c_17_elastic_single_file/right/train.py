import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import elastic
import network
import stream


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = network.make()
    opt = torch.optim.NAdam(model.parameters(), lr=4e-3, eps=1e-4, foreach=False)
    seen = 0
    if args.resume:
        seen = elastic.load(elastic.newest(args.resume), model, opt)["seen"]

    while seen < args.steps * args.batch:
        mine = range(seen + rank, seen + args.batch, world)
        tokens, labels = stream.collate(mine)
        loss = F.cross_entropy(model(tokens), labels, reduction="sum")
        (loss * world / args.batch).backward()
        opt.step()
        opt.zero_grad()
        seen += args.batch
        step = seen // args.batch
        if args.out and args.save_every and step % args.save_every == 0:
            elastic.save(os.path.join(args.out, f"seen_{seen}.pt"), model, opt, seen=seen)
        dist.all_reduce(total := loss.detach().clone())
        if rank == 0:
            print(f"{seen:5d} samples  loss {total.item() / args.batch:.4f}", flush=True)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
