"""SimSiam pre-training with LARS on FSDP2 shards."""
import argparse
import math

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from lars import LARS, split_params
from net import SimSiam
from views import augment, shapes


def lr_at(step, total, peak, warmup=5):
    if step < warmup:
        return peak * (step + 1) / warmup
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.5)
    ap.add_argument("--export", default=None, help="write the backbone as a plain state dict")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = SimSiam()
    for part in (model.backbone, model.projector, model.predictor):
        fully_shard(part)
    fully_shard(model)
    opt = LARS(split_params(model), lr=args.lr)

    images, _ = shapes()
    order = torch.Generator().manual_seed(17)
    running = 0.0
    for step in range(args.steps):
        ids = torch.randperm(len(images), generator=order)[:args.batch][rank::world]
        x = images[ids]
        for group in opt.param_groups:
            group["lr"] = lr_at(step, args.steps, args.lr)
        loss = model(augment(x, ids, step, 0), augment(x, ids, step, 1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        running = shown.item() / world if step == 0 else 0.8 * running + 0.2 * shown.item() / world
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} loss {running:.4f}", flush=True)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save({k[len("backbone."):]: v for k, v in full.items() if k.startswith("backbone.")}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
