"""Query and document towers trained with a gradient cache; two separate FSDP roots and one optimizer."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from cache import cached_backward
from towers import Tower, pairs

FULL = StateDictOptions(full_state_dict=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    towers = torch.nn.ModuleList([Tower(20), Tower(28)])
    for t in towers:
        fully_shard(t.net)
        fully_shard(t)
    optim = torch.optim.AdamW(towers.parameters(), lr=4e-3)

    step = 0
    if args.resume:
        last = max(int(f[:-3]) for f in os.listdir(args.resume))
        ck = torch.load(os.path.join(args.resume, f"{last}.pt"))
        set_model_state_dict(towers, ck["towers"], options=FULL)
        set_optimizer_state_dict(towers, optim, ck["optim"], options=FULL)
        step = ck["step"]
    while step < args.steps:
        inputs = [x.chunk(world)[rank] for x in pairs(step, 64)]
        loss = cached_backward(towers, inputs, chunk=8, tau=0.1)
        optim.step()
        optim.zero_grad()
        step += 1
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            ck = {"towers": get_model_state_dict(towers, options=FULL),
                  "optim": get_optimizer_state_dict(towers, optim, options=FULL), "step": step}
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(ck, os.path.join(args.out, f"{step}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
