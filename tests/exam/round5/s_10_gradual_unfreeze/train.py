import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from net import Tuned
from stages import Unfreeze


def task(step, n):
    proto = torch.randn(5, 10, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(600 + step)
    y = torch.randint(0, 5, (n,), generator=g)
    return proto[y] + torch.randn(n, 10, generator=g), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--unfreeze-at", type=int, default=6)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(77)
    model = Tuned()
    for layer in model.backbone.layers:
        fully_shard(layer)
    fully_shard(model.backbone)
    fully_shard(model)
    stages = Unfreeze(model, args.unfreeze_at)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)

    first = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        weights = get_model_state_dict(model)
        dcp.load(weights, checkpoint_id=os.path.join(args.resume, newest))
        set_model_state_dict(model, weights)
        first = int(newest)
        if rank == 0:
            print(f"resumed at step {first}", flush=True)

    for step in range(first, args.steps):
        stages.before_step(step)
        x, y = task(step, args.batch)
        loss = F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        dist.all_reduce(mean := loss.detach().clone())
        if rank == 0 and step % 4 == 0:
            print(f"{step:3d} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(get_model_state_dict(model), checkpoint_id=os.path.join(args.out, str(step + 1)))

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
