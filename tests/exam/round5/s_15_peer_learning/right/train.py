import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from data import Stream
from peers import Peers

GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
SPREAD = StateDictOptions(full_state_dict=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="peers")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    peers = Peers()
    fully_shard(peers.a)
    fully_shard(peers.b)
    fully_shard(peers)  # the root owns no parameters of its own
    opt = torch.optim.AdamW([{"params": peers.a.parameters(), "lr": 1e-2}, {"params": peers.b.parameters(), "lr": 5e-3}])
    stream = Stream(args.batch, rank, world)
    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda f: int(f[4:-3]))
        blob = torch.load(os.path.join(args.resume, newest), weights_only=False)
        set_model_state_dict(peers, blob["model"], options=SPREAD)
        set_optimizer_state_dict(peers, opt, blob["opt"], options=SPREAD)
        stream.load_state_dict(blob["stream"])
        step = blob["step"]

    for x, y in stream:
        weight = min(1.0, step / 10)  # trust each other more and more
        loss = peers(x, y, weight)
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(shown := loss.detach() / world)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {shown.item():.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            blob = {"model": get_model_state_dict(peers, options=GATHER), "step": step,
                    "opt": get_optimizer_state_dict(peers, opt, options=GATHER), "stream": stream.state_dict()}
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(blob, os.path.join(args.out, f"peer{step}.pt"))
            dist.barrier()
        if step >= args.steps:
            break
    sd = get_model_state_dict(peers, options=GATHER)
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
