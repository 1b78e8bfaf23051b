import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import export
from lora import inject
from model import pretrained
from sft_data import collate


def sft_loss(model, ids, labels):
    """sum of the answer losses on this rank divided by the answer tokens of all ranks"""
    count = (labels != -100).sum()
    dist.all_reduce(count)
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count


def main():
    ap = argparse.ArgumentParser(description="rsLoRA supervised fine-tuning")
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--rank", type=int, default=4)
    ap.add_argument("--alpha", type=float, default=4.0)
    ap.add_argument(
        "--merged", default=os.path.join(tempfile.gettempdir(), "merged.pt"), help="file for the merged model"
    )
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = pretrained()
    torch.manual_seed(5)
    inject(model, {"q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"}, args.rank, args.alpha)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, args.steps - 5), eta_min=args.lr / 10),
        ],
        milestones=[5],
    )

    for step in range(args.steps):
        rows = range(step * args.batch, (step + 1) * args.batch)
        ids, labels = collate(rows[rank::world])
        loss = sft_loss(model, ids, labels)
        (loss * world).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step + 1:2d} loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        held_out = range(100_000, 100_064)
        val = sft_loss(model, *collate(held_out[rank::world]))
    dist.all_reduce(val)
    if rank == 0:
        print(f"validation loss {val.item():.5f}")
    if args.merged:
        export.write(model, args.merged, args.rank, args.alpha)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
