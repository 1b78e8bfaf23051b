"""Two-tower contrastive training with FSDP2 (was DDP before)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import PairedViews
from model import TwoTower, clip_loss


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=32, help="global batch")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    return p.parse_args()


def newest(folder):
    steps = [int(d.split("_")[1]) for d in os.listdir(folder) if d.startswith("step_")]
    return os.path.join(folder, f"step_{max(steps)}")


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = TwoTower()
    for tower in (model.image, model.text):
        for layer in tower.hidden:
            fully_shard(layer)
        fully_shard(tower)
    # a scalar cannot be sharded, it stays a plain parameter
    fully_shard(model, ignored_params={model.logit_scale})

    decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
    rest = [p for n, p in model.named_parameters() if p.ndim == 1]
    optim = torch.optim.AdamW([
        {"params": decay, "weight_decay": 0.05},
        {"params": rest, "weight_decay": 0.0},
        {"params": [model.logit_scale], "weight_decay": 0.0, "lr": 3e-2},
    ], lr=args.lr, foreach=False)
    data = PairedViews()

    first = 0
    if args.resume:
        msd, osd = get_state_dict(model, optim)
        state = {"model": msd, "optim": osd, "step": 0}
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        first = state["step"]

    per_rank = args.batch // world
    for step in range(first, args.steps):
        image, text = data.batch(step, args.batch)
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        img, txt, scale = model(image[mine], text[mine])
        loss = clip_loss(img, txt, scale)
        loss.backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6)

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} loss {shown.item() / world:.4f} scale {model.logit_scale.exp().item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            msd, osd = get_state_dict(model, optim)
            dcp.save({"model": msd, "optim": osd, "step": step + 1},
                     checkpoint_id=os.path.join(args.out, f"step_{step + 1}"))
    print(f"rank {rank} final logit_scale {model.logit_scale.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
